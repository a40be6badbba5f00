-- ARGV: incarnation, step -> nil.
local step = tonumber(ARGV[2])
fence(tonumber(ARGV[1]))
permit()
if step <= number('archived') then return nil end
if number('taken_step') ~= step then stop('STATE no batch is recorded for step ' .. step) end
if redis.call('LLEN', TAKEN) < places(step) then stop('STATE the batch of step ' .. step .. ' has places to fill') end
acknowledge(step)
return nil

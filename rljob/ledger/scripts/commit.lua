-- ARGV: incarnation, step, version incarnation, version n, digest -> nil.
local step = tonumber(ARGV[2])
fence(tonumber(ARGV[1]))
permit()
local trained, taken_step = number('trained'), number('taken_step')
if step < trained then stop('STATE step ' .. step .. ' after step ' .. trained .. ' was committed') end
if taken_step > 0 and taken_step <= step then
  if redis.call('LLEN', TAKEN) < places(taken_step) then stop('STATE the batch of step ' .. taken_step .. ' has places to fill') end
  acknowledge(taken_step)
end
if step > trained then progress() end
set('trained', step, 'archived', math.max(step, number('archived')), 'policy_incarnation', ARGV[3], 'policy_n', ARGV[4], 'digest', ARGV[5])
return nil

-- ARGV: incarnation, step, reason, evidence, then groups of the recorded batch -> nil.
fence(tonumber(ARGV[1]))
permit()
if number('taken_step') ~= tonumber(ARGV[2]) then stop('STATE no batch is recorded for step ' .. ARGV[2]) end
for i = 5, #ARGV do
  if redis.call('LREM', TAKEN, 0, ARGV[i]) == 1 then kill(ARGV[i], '', ARGV[3], ARGV[4]) end
end
return nil

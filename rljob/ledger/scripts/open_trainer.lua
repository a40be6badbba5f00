-- ARGV: boot, at least -> incarnation.
permit()
if redis.call('HGET', STATE, 'trainer_boot') == ARGV[1] then return cmsgpack.pack(number('incarnation')) end
local incarnation = math.max(number('incarnation'), tonumber(ARGV[2])) + 1
set('incarnation', incarnation, 'trainer_boot', ARGV[1])
-- A trainer starts only in a job that runs: whoever drained it for a suspension may have died since.
redis.call('HDEL', STATE, 'draining')
-- A trainer that starts again takes a failed job up, and a finished one that was given more steps.
local known = load_rules()
if redis.call('HGET', STATE, 'phase') == 'Failed' or (known and number('trained') < known.steps) then
  redis.call('HDEL', STATE, 'phase', 'message')
end
return cmsgpack.pack(incarnation)

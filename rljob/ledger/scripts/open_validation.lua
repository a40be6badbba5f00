-- ARGV: incarnation, step, version incarnation, version n, rows, samples, settled -> nil.
local step, run = ARGV[2], P .. 'v:' .. ARGV[2]
fence(tonumber(ARGV[1]))
permit()
local v = redis.call('HMGET', run, 'incarnation', 'n', 'rows', 'samples', 'settled')
local same = v[1] and v[3] == ARGV[5] and v[4] == ARGV[6] and v[5] == ARGV[7]
if same and ARGV[7] == '1' then same = v[1] == ARGV[3] and v[2] == ARGV[4] end
if not same then
  purge_validation(step)
  redis.call('HSET', run, 'rows', ARGV[5], 'samples', ARGV[6], 'settled', ARGV[7], 'cursor', 0, 'done', 0, 'dead', 0,
    'sum', 0, 'lo', -1, 'hi', -1)
end
redis.call('HSET', run, 'incarnation', ARGV[3], 'n', ARGV[4], 'owner', ARGV[1])
-- Runs of a trainer that died and that its successor does not follow.
for _, other in ipairs(redis.call('ZRANGE', VALIDATIONS, 0, -1)) do
  if other ~= step and redis.call('HGET', P .. 'v:' .. other, 'owner') ~= ARGV[1] then purge_validation(other) end
end
redis.call('ZADD', VALIDATIONS, step, step)
return nil

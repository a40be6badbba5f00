-- ARGV: incarnation, step -> nil.
fence(tonumber(ARGV[1]))
permit()
local v = redis.call('HMGET', P .. 'v:' .. ARGV[2], 'done', 'dead', 'sum')
if not v[1] then return nil end
local scored = tonumber(v[1]) + tonumber(v[2])
purge_validation(ARGV[2])
if scored > 0 then redis.call('HSET', P .. 'scores', ARGV[2], tonumber(v[3]) / scored) end
progress()
return nil

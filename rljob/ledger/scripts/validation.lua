-- ARGV: step -> nil, or {total, done, dead, running, sum of rewards, settled, oldest n, newest n}.
local v = redis.call('HMGET', P .. 'v:' .. ARGV[1], 'rows', 'samples', 'done', 'dead', 'sum', 'settled', 'lo', 'hi')
if not v[1] then return nil end
local running = 0
for _, id in ipairs(redis.call('ZRANGE', P .. 'vleases', 0, -1)) do
  if parse(id).step == ARGV[1] then running = running + 1 end
end
return cmsgpack.pack({tonumber(v[1]) * tonumber(v[2]), tonumber(v[3]), tonumber(v[4]), running, tonumber(v[5]), tonumber(v[6]),
  tonumber(v[7]), tonumber(v[8])})

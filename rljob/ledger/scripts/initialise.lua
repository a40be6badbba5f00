-- ARGV: names of fixed rules (comma), then name, value, … -> nil, or {name, stored, given} of a fixed rule that differs.
permit()
for i = 2, #ARGV, 2 do
  local stored = redis.call('HGET', CONFIG, ARGV[i])
  local fixed = string.find(',' .. ARGV[1] .. ',', ',' .. ARGV[i] .. ',', 1, true)
  if fixed and stored and stored ~= ARGV[i + 1] then return cmsgpack.pack({ARGV[i], stored, ARGV[i + 1]}) end
end
redis.call('HSET', CONFIG, unpack(ARGV, 2))
redis.call('HSETNX', STATE, 'last_beat', now())
return nil

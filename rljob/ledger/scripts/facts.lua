-- -> {{name, value}, …}: what the audit compares; bitmaps in hexadecimal.
local counts = {}
for _, name in ipairs({'leased', 'completed', 'failed', 'retried', 'expired', 'evicted', 'dead', 'dropped', 'rerun', 'trained'}) do
  counts[#counts + 1] = {name, number('c_' .. name)}
end
local outstanding, live = {}, redis.call('ZRANGE', LIVE, 0, -1)
for _, group in ipairs(live) do
  for i, m in ipairs(members(group)) do
    if m.s == 'd' then outstanding[#outstanding + 1] = group .. '.' .. (i - 1) end
  end
end
local evictions, flat = {}, redis.call('HGETALL', EVICTIONS)
for i = 1, #flat, 2 do evictions[#evictions + 1] = {flat[i], tonumber(flat[i + 1])} end
local function bitmap(name)
  local bits = redis.call('GET', P .. name) or ''
  return (string.gsub(bits, '.', function(byte) return string.format('%02x', string.byte(byte)) end))
end
return cmsgpack.pack({
  {'step', number('trained')}, {'archived_step', number('archived')}, {'counts', counts}, {'outstanding', outstanding},
  {'live_groups', live}, {'evictions', evictions}, {'dead_rows', bitmap('dead_rows')}, {'dropped_rows', bitmap('dropped_rows')},
  {'finished', redis.call('HEXISTS', STATE, 'phase') == 1},
})

-- ARGV: incarnation, step, entry id -> nil. Payloads up to that entry stand in the artifact store; that they are scored is kept.
local run = P .. 'v:' .. ARGV[2]
fence(tonumber(ARGV[1]))
permit()
local bodies, entries = {}, {}
for _, entry in ipairs(redis.call('XRANGE', run .. ':stream', '-', ARGV[3], 'COUNT', 1000)) do
  entries[#entries + 1] = entry[1]
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'k' then bodies[#bodies + 1] = P .. entry[2][i + 1] end
  end
end
if #entries == 0 then return nil end
redis.call('UNLINK', unpack(bodies))
redis.call('XDEL', run .. ':stream', unpack(entries))
return cmsgpack.pack(#entries)

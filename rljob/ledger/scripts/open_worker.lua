-- ARGV: worker, boot -> {{episode, attempt, milliseconds left}, …}: what this boot holds.
local worker, boot = ARGV[1], ARGV[2]
local hash = P .. 'w:' .. worker
local current, old = redis.call('HGET', hash, 'boot'), redis.call('HGET', hash, 'old') or ''
-- A boot that was replaced never comes back: it is a process that should have ended.
if string.find(old, boot, 1, true) then stop('FENCED boot ' .. boot .. ' of worker ' .. worker .. ' was replaced') end
permit()
beat()
if current and current ~= boot then
  redis.call('HSET', hash, 'boot', boot, 'old', string.sub(current .. ' ' .. old, 1, 1024))
  redis.call('HDEL', hash, 'request', 'reply', 'held')
end
register(worker, boot)
local open = {}
each_lease(function(e, m)
  if m.w ~= worker then return end
  if m.b ~= boot then return lose(e, m) end
  open[#open + 1] = {e.id, m.a, math.max(0, tonumber(redis.call('ZSCORE', queue(e, 'leases'), e.id)) - now())}
end)
return cmsgpack.pack(open)

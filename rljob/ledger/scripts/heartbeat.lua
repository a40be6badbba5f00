-- ARGV: worker, boot, then episode, attempt, … -> {verdict, …} in the same order.
local worker, boot = ARGV[1], ARGV[2]
permit()
register(worker, boot)
beat()
local checked = {}
local function hopeless(e)
  if not e.training or checked[e.group] then return false end
  checked[e.group] = true
  if not past(e.group, next_version()) then return false end
  evict(e.group)
  return true
end
local function verdict(e, attempt)
  local m = load(e)
  if not m then
    -- Trained, dead or closed; or evicted, which the count of its row tells.
    local evictions = e.training and tonumber(redis.call('HGET', EVICTIONS, e.index) or 0) or 0
    return e.training and evictions > e.evictions and 'hopeless' or 'already_done'
  end
  if m.s == 'd' or m.s == 'x' then return 'already_done' end
  if hopeless(e) then return 'hopeless' end
  -- An attempt whose lease ended and went to another worker may still come first.
  if m.a ~= attempt then return 'ok' end
  if m.s == 'w' or m.w ~= worker or m.b ~= boot then return 'already_done' end
  if m.s == 'm' then
    redis.call('ZREM', queue(e, 'missing'), e.id)
    m.s = 'l'
    save(e, m)
  end
  redis.call('ZADD', queue(e, 'leases'), now() + milliseconds('lease_seconds'), e.id)
  return 'ok'
end
local verdicts = {}
for i = 3, #ARGV, 2 do verdicts[#verdicts + 1] = verdict(parse(ARGV[i]), tonumber(ARGV[i + 1])) end
return cmsgpack.pack(verdicts)

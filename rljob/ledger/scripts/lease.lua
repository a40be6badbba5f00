-- ARGV: worker, boot, request, engine incarnation, engine n, free slots -> {{{episode, attempt, ms}, …}, reason, retry after ms}.
local worker, boot, request = ARGV[1], ARGV[2], ARGV[3]
local incarnation, n, slots = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local POLL_MILLISECONDS = 250
permit()
local hash = register(worker, boot)
if redis.call('HGET', hash, 'request') == request then return redis.call('HGET', hash, 'reply') end
beat()

local leases, lease_ms = {}, 0
local function grant(e, m)
  m = m or {f = 0, l = 0}
  leave_queue(e, m)
  m.s, m.a, m.n, m.i, m.w, m.b = 'l', (m.a or 0) + 1, n, incarnation, worker, boot
  redis.call('ZADD', queue(e, 'leases'), now() + lease_ms, e.id)
  save(e, m)
  count('leased')
  if m.a > 1 then count('retried') end
  leases[#leases + 1] = {e.id, m.a, lease_ms}
  slots = slots - 1
end
local function answer(reason, wait)
  local due = redis.call('ZRANGE', P .. 'retry', 0, 0, 'WITHSCORES')[2]
  if due then wait = math.min(wait, math.max(10, tonumber(due) - now())) end
  local reply = cmsgpack.pack({leases, reason, reason == '' and 0 or wait})
  redis.call('HSET', hash, 'request', request, 'reply', reply)
  return reply
end
-- Grant from a queue, in its order, what `may` allows; what it refuses stays.
local function serve(from, until_score, may)
  local skipped = 0
  while slots > 0 do
    local ids = redis.call('ZRANGEBYSCORE', from, '-inf', until_score, 'LIMIT', skipped, math.min(slots, 128))
    if #ids == 0 then return end
    for _, id in ipairs(ids) do
      local e = parse(id)
      local verdict = may(e)
      if verdict == 'grant' then grant(e, load(e)) elseif verdict == 'skip' then skipped = skipped + 1 end
    end
  end
end

if redis.call('HEXISTS', STATE, 'phase') == 1 then return answer('finished', 1000) end
if redis.call('HEXISTS', STATE, 'draining') == 1 then return answer('draining', 1000) end
local policy = redis.call('HMGET', STATE, 'policy_incarnation', 'policy_n')
if not load_rules() or not policy[1] or n < 0 then return answer('no_policy', POLL_MILLISECONDS) end
lease_ms = milliseconds('lease_seconds')
local in_line = incarnation == tonumber(policy[1])

local info = redis.pcall('INFO', 'memory')
info = type(info) == 'string' and info or ''
local limit = tonumber(string.match(info, 'maxmemory:(%d+)') or 0)
local used = tonumber(string.match(info, 'used_memory:(%d+)') or 0)
local fill = limit > 0 and used / limit or 0

-- Validation first. A run that is settled only on its exact version; its volume is bounded, so it may use more memory.
local quota = tonumber(rule('max_running_validation')) or rule('max_concurrent_episodes')
local function room() return quota - redis.call('ZCARD', P .. 'vleases') end
for _, step in ipairs(redis.call('ZRANGE', VALIDATIONS, 0, -1)) do
  local run = P .. 'v:' .. step
  local v = redis.call('HMGET', run, 'incarnation', 'n', 'rows', 'samples', 'settled', 'cursor', 'owner')
  local exact = incarnation == tonumber(v[1]) and n == tonumber(v[2])
  local followed = tonumber(v[7]) == number('incarnation')
  if fill < 0.9 and followed and (exact or (v[5] == '0' and in_line)) then
    local function may() return room() > 0 and 'grant' or 'skip' end
    serve(run .. ':retry', now(), may)
    serve(run .. ':missing', '+inf', may)
    local cursor, samples = tonumber(v[6]), tonumber(v[4])
    while slots > 0 and room() > 0 and cursor < tonumber(v[3]) * samples do
      grant(parse(string.format('v%s-%d.%d', step, math.floor(cursor / samples), cursor % samples)), nil)
      cursor = cursor + 1
    end
    redis.call('HSET', run, 'cursor', cursor)
  end
end

-- An engine of another line (before a resume) must switch first.
if not in_line then return answer(slots > 0 and 'engine_behind' or '', POLL_MILLISECONDS) end

-- Members of started groups, even when memory is short: only whole groups can be trained and freed. An engine that is behind
-- the version under which the group was admitted would break its bound. After a resume n may have gone back: then any engine
-- of the line serves.
local archived, verdicts, behind = number('archived'), {}, false
local function may(e)
  if not verdicts[e.group] then
    local started = tonumber(redis.call('HGET', e.key, 'start_n'))
    verdicts[e.group] = 'grant'
    if past(e.group, next_version()) then
      evict(e.group)
      verdicts[e.group] = 'gone'
    elseif n < math.min(started, archived) then
      behind = true
      verdicts[e.group] = 'skip'
    elseif n < started then
      may_be_old(e.group, n)
    end
  end
  return verdicts[e.group]
end
serve(P .. 'retry', now(), may)
serve(P .. 'missing', '+inf', may)

-- New groups.
local B, size, eta = rule('groups_per_step'), rule('group_size'), rule('max_staleness')
local trained = number('trained')
local function bound(version) return math.min((eta + math.min(version, trained) + 1) * B, all_groups()) end
local function refusal()
  local have = admitted()
  if have >= all_groups() then return 'all_steps_admitted' end
  if have >= bound(n) then return have < bound(tonumber(policy[2])) and 'engine_behind' or 'staleness_bound' end
  if number('open') + size > rule('max_concurrent_episodes') then return 'at_capacity' end
  -- Below one whole batch more memory can only be won by filling it.
  if fill >= 0.8 and live_groups() - redis.call('LLEN', TAKEN) >= B then return 'memory' end
  return nil
end
local function next_group()
  local index = redis.call('ZRANGE', REQUEUE, 0, 0)[1]
  if index then
    redis.call('ZREM', REQUEUE, index)
    return 't' .. index .. '-' .. redis.call('HGET', EVICTIONS, index)
  end
  return 't' .. (redis.call('HINCRBY', STATE, 'next_index', 1) - 1) .. '-0'
end
local function start_group()
  local group, seq = next_group(), redis.call('HINCRBY', STATE, 'seq', 1)
  redis.call('HSET', P .. 'g:' .. group, 'seq', seq, 'start_n', n, 'done', 0, 'size', size)
  redis.call('ZADD', LIVE, seq, group)
  redis.call('ZADD', RUNNING, seq, group)
  redis.call('ZADD', OLDEST, n, group)
  redis.call('HINCRBY', STATE, 'open', size)
  for member = 0, size - 1 do
    local e = parse(group .. '.' .. member)
    local m = {f = 0, l = 0, a = 0}
    if slots > 0 then grant(e, m) else to_missing(e, m) end
  end
end
local reason = ''
while slots > 0 do
  local why = refusal()
  if why then
    reason = why
    break
  end
  start_group()
end
if reason ~= '' and behind and #leases == 0 then reason = 'engine_behind' end
return answer(reason, POLL_MILLISECONDS)

-- Shared by every script: sent to the server in front of the call's own file. Works on Redis >= 6.2 and Valkey.
-- KEYS[1] is the job's prefix "rljob:{job}:"; all keys share its hash tag. Errors begin with FENCED or STATE.
local P = KEYS[1]
local STATE, CONFIG = P .. 'state', P .. 'config'
local LIVE, RUNNING, READY, TAKEN = P .. 'live', P .. 'running', P .. 'ready', P .. 'taken'
local STREAM, DEAD, EVICTIONS, REQUEUE = P .. 'stream', P .. 'dead', P .. 'evictions', P .. 'requeue'
local OLDEST, VALIDATIONS = P .. 'oldest', P .. 'validations'
local DEAD_LETTERS_KEPT = 10000
-- A lease that ended without a word (worker killed, network gone) is rarely the episode's fault; a prompt that kills its
-- worker must end all the same. So many lost leases weigh as one reported failure.
local LOST_PER_FAILURE = 4

-- The server's clock in milliseconds, the same throughout a script.
local clock
local function now()
  if not clock then
    local time = redis.call('TIME')
    clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  return clock
end

-- A full store refuses the first write of a script if it could take memory, but none after a first write that cannot.
-- A DEL of nothing is such a write. Every call but `complete` and the start of new groups must go on when memory is full.
local function permit() redis.call('DEL', P .. 'nothing') end

local function stop(message) error(message, 0) end
local function number(field) return tonumber(redis.call('HGET', STATE, field) or 0) end
local function set(...) redis.call('HSET', STATE, ...) end
local function count(name, by) redis.call('HINCRBY', STATE, 'c_' .. name, by or 1) end
local function progress() redis.call('HINCRBY', STATE, 'progress', 1) end

local rules
local function load_rules()
  if rules then return rules end
  local flat = redis.call('HGETALL', CONFIG)
  if #flat == 0 then return nil end
  rules = {}
  for i = 1, #flat, 2 do rules[flat[i]] = tonumber(flat[i + 1]) or flat[i + 1] end
  return rules
end
local function rule(name)
  local known = load_rules() or stop('STATE the ledger was never initialised')
  return known[name]
end
local function milliseconds(name) return math.floor(rule(name) * 1000) end

-- Only the newest trainer may decide. A number that was never given out means that the store lost writes.
local function fence(incarnation)
  local newest = number('incarnation')
  if incarnation < newest then stop('FENCED incarnation ' .. incarnation .. ' was replaced by ' .. newest) end
  if incarnation > newest then stop('STATE incarnation ' .. incarnation .. ' is unknown, the newest is ' .. newest) end
end

-- Episodes. Of both classes: hash and field of its record; `queue` names the sorted set of a state it may be in.
local function parse(id)
  local kind, major, minor, member = string.match(id, '^([tv])(%d+)%-(%d+)%.(%d+)$')
  if not kind then stop('STATE not an episode: ' .. id) end
  local group = kind .. major .. '-' .. minor
  if kind == 't' then
    return {id = id, training = true, group = group, index = major, evictions = tonumber(minor), key = P .. 'g:' .. group, field = member}
  end
  local run = P .. 'v:' .. major
  return {id = id, group = group, run = run, step = major, row = tonumber(minor), sample = tonumber(member), key = run .. ':m',
    field = minor .. '.' .. member}
end
local function queue(e, name)
  if e.training then return P .. name end
  return name == 'leases' and (P .. 'vleases') or (e.run .. ':' .. name)
end

-- Record of an episode: s state (m missing, l leased, w waiting for its retry, d done, x dead: validation only), a newest
-- attempt, f failures, l lost leases, n and i version named by the lease, w worker, b boot; once done: c attempt that
-- completed, x stream entry, k key of its payload, r reward, lo and hi oldest and newest n of its tokens (-1: nothing was sampled).
local function load(e)
  local packed = redis.call('HGET', e.key, e.field)
  return packed and cmsgpack.unpack(packed) or nil
end
local function save(e, m) redis.call('HSET', e.key, e.field, cmsgpack.pack(m)) end
local QUEUES = {l = 'leases', m = 'missing', w = 'retry'}
local function leave_queue(e, m)
  local name = QUEUES[m.s]
  if name then redis.call('ZREM', queue(e, name), e.id) end
end
local function to_missing(e, m)
  leave_queue(e, m)
  m.s = 'm'
  local order = e.row or (tonumber(redis.call('HGET', e.key, 'seq')) * 1024 + tonumber(e.field))
  redis.call('ZADD', queue(e, 'missing'), order, e.id)
  save(e, m)
end

-- Training groups: hash "g:<group>" with seq, start_n, done, one record per member.
local function index_of(group)
  local index, evictions = string.match(group, '^t(%d+)%-(%d+)$')
  return index, tonumber(evictions)
end
local function members(group)
  local flat, list = redis.call('HGETALL', P .. 'g:' .. group), {}
  for i = 1, #flat, 2 do
    if string.match(flat[i], '^%d+$') then list[tonumber(flat[i]) + 1] = cmsgpack.unpack(flat[i + 1]) end
  end
  return list
end
local function live_groups() return redis.call('ZCARD', LIVE) end
local function admitted() return number('archived') * rule('groups_per_step') + live_groups() end
-- Groups that the whole job may take. Where nothing is trained their number need not fill the last batch, and in one pass over
-- the rows no other row takes the place of a dead one.
local function collects() return type(rule('num_groups')) == 'number' end
local function all_groups()
  if not collects() then return rule('steps') * rule('groups_per_step') end
  return rule('num_groups') - (rule('one_pass') == 'True' and number('c_dead') or 0)
end
-- Groups of the batch of a step.
local function places(step)
  local B = rule('groups_per_step')
  return collects() and math.max(0, math.min(B, all_groups() - (step - 1) * B)) or B
end

-- Remove every trace of a group. Deletes first, so that it works when memory is full.
local function forget(group)
  local list, entries, bodies, open = members(group), {}, {}, 0
  redis.call('DEL', P .. 'g:' .. group)
  for i, m in ipairs(list) do
    if m.s == 'd' then
      entries[#entries + 1], bodies[#bodies + 1] = m.x, P .. m.k
    else
      open = open + 1
    end
    leave_queue(parse(group .. '.' .. (i - 1)), m)
  end
  if #entries > 0 then
    redis.call('UNLINK', unpack(bodies))
    redis.call('XDEL', STREAM, unpack(entries))
  end
  redis.call('ZREM', LIVE, group)
  redis.call('ZREM', RUNNING, group)
  redis.call('ZREM', READY, group)
  redis.call('ZREM', OLDEST, group)
  if open > 0 then redis.call('HINCRBY', STATE, 'open', -open) end
end

local function dead_letter(group, episode, reason, evidence)
  redis.call('XADD', DEAD, 'MAXLEN', '~', DEAD_LETTERS_KEPT, '*', 'g', group, 'e', episode or '', 'r', reason, 't', evidence or '')
end
-- The group is given up; the next index takes its place because admission counts it no more.
local function kill(group, episode, reason, evidence)
  local index = index_of(group)
  forget(group)
  redis.call('HDEL', EVICTIONS, index)
  redis.call('SETBIT', P .. 'dead_rows', index, 1)
  dead_letter(group, episode, reason, evidence)
  count('dead')
end
-- The group is run again under its index, once admission lets it.
local function evict(group)
  local index, evictions = index_of(group)
  if evictions >= rule('max_evictions') then return kill(group, '', 'too_slow', 'evicted ' .. evictions .. ' times') end
  forget(group)
  redis.call('HSET', EVICTIONS, index, evictions + 1)
  redis.call('ZADD', REQUEUE, index, index)
  count('evicted')
end

-- The n that is trained next by a batch that is not recorded yet.
local function next_version()
  return number('archived') + (redis.call('HEXISTS', STATE, 'taken_step') == 1 and 1 or 0)
end
-- Oldest n of the group's tokens (a leased member counts with the version of its lease); newest n, unless members run.
local function span(group, list)
  local lo, hi, whole = nil, -1, true
  for _, m in ipairs(list or members(group)) do
    local n = (m.s == 'd' and m.lo) or (m.s == 'l' and m.n) or -1
    if n >= 0 and (not lo or n < lo) then lo = n end
    if m.s == 'd' then hi = math.max(hi, m.hi) else whole = false end
  end
  return lo, hi, whole
end
-- Sorted set OLDEST: per group, a lower bound of what `span` finds, so that young groups need not be read.
local function may_be_old(group, n) redis.call('ZADD', OLDEST, 'LT', n, group) end
-- Whether a batch that trains version n may no longer hold the group.
local function past(group, n)
  local bound = n - rule('max_staleness')
  if tonumber(redis.call('ZSCORE', OLDEST, group)) >= bound then return false end
  local lo, hi, whole = span(group)
  if not lo then return false end
  if rule('on_stale') == 'mask' then return whole and hi >= 0 and hi < bound end
  return lo < bound
end

-- Acknowledge the recorded batch: it stands in the archive.
local function acknowledge(step)
  for _, group in ipairs(redis.call('LRANGE', TAKEN, 0, -1)) do
    forget(group)
    redis.call('HDEL', EVICTIONS, (index_of(group)))
    count('trained', rule('group_size'))
  end
  redis.call('DEL', TAKEN)
  redis.call('HDEL', STATE, 'taken_step', 'wait_step')
  set('archived', math.max(step, number('archived')))
  progress()
end
local function make_ready(group, list)
  local hash = P .. 'g:' .. group
  local n = span(group, list) or tonumber(redis.call('HGET', hash, 'start_n'))
  -- Oldest policy first, then oldest start. Exact in a double: n below 2^20, seq below 2^32.
  redis.call('ZADD', READY, n * 4294967296 + tonumber(redis.call('HGET', hash, 'seq')), group)
end
local function untake()
  for _, group in ipairs(redis.call('LRANGE', TAKEN, 0, -1)) do make_ready(group) end
  redis.call('DEL', TAKEN)
  redis.call('HDEL', STATE, 'taken_step')
end

-- Validation runs: hash "v:<step>", ":m" records, ":stream", ":missing", ":retry".
local function purge_validation(step)
  local run = P .. 'v:' .. step
  for _, packed in ipairs(redis.call('HVALS', run .. ':m')) do
    local m = cmsgpack.unpack(packed)
    if m.k then redis.call('UNLINK', P .. m.k) end
  end
  redis.call('DEL', run, run .. ':m', run .. ':stream', run .. ':missing', run .. ':retry')
  redis.call('ZREM', VALIDATIONS, step)
  for _, id in ipairs(redis.call('ZRANGE', P .. 'vleases', 0, -1)) do
    if parse(id).step == tostring(step) then redis.call('ZREM', P .. 'vleases', id) end
  end
end
local function bury_sample(e, m, reason, evidence)
  leave_queue(e, m)
  m.s = 'x'
  save(e, m)
  redis.call('HINCRBY', e.run, 'dead', 1)
  dead_letter(e.group, e.id, reason, evidence)
  progress()
end

-- Leases.
local function lose(e, m)
  count('expired')
  m.l = (m.l or 0) + 1
  if m.l < LOST_PER_FAILURE * rule('max_attempts') then return to_missing(e, m) end
  local evidence = m.l .. ' leases ended without a word, the last one of worker ' .. m.w
  if e.training then kill(e.group, e.id, 'lease_lost', evidence) else bury_sample(e, m, 'lease_lost', evidence) end
end
local function each_lease(visit)
  for _, leases in ipairs({P .. 'leases', P .. 'vleases'}) do
    for _, id in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
      local e = parse(id)
      local m = load(e)
      -- Earlier visits may have killed the group.
      if m and m.s == 'l' then visit(e, m) end
    end
  end
end
local function extend_all()
  local deadline = now() + milliseconds('lease_seconds')
  for _, leases in ipairs({P .. 'leases', P .. 'vleases'}) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', deadline)) do redis.call('ZADD', leases, deadline, id) end
  end
end
local function expire()
  for _, leases in ipairs({P .. 'leases', P .. 'vleases'}) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now())) do
      local e = parse(id)
      local m = load(e)
      if m and m.s == 'l' then lose(e, m) else redis.call('ZREM', leases, id) end
    end
  end
end
-- Every call of a worker passes here, and only here do leases end: while no worker can reach the store none does. The first
-- call after a restart of the server, or after a time in which nobody could heartbeat, gives every lease one more term.
local SWEEP_MILLISECONDS = 250
local function beat()
  local silent = now() - number('last_beat')
  set('last_beat', now())
  if not load_rules() or now() - number('swept') < SWEEP_MILLISECONDS then return end
  set('swept', now())
  local info = redis.pcall('INFO', 'server')
  local run = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
  local restarted = run ~= (redis.call('HGET', STATE, 'run_id') or run)
  set('run_id', run)
  if restarted or silent > 2 * milliseconds('heartbeat_seconds') then extend_all() end
  expire()
end

-- Workers: hash "w:<name>" with boot, old (boots that were replaced), seen, held, request, reply.
local function register(worker, boot)
  local hash = P .. 'w:' .. worker
  local current = redis.call('HGET', hash, 'boot')
  if current and current ~= boot then stop('FENCED worker ' .. worker .. ' runs under boot ' .. current) end
  redis.call('SADD', P .. 'workers', worker)
  redis.call('HSET', hash, 'boot', boot, 'seen', now())
  return hash
end

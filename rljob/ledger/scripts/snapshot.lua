-- -> {{name, value}, …}; maps as lists of pairs, numbers that may be missing as "".
local known = load_rules() or {}
local function value(field) return tonumber(redis.call('HGET', STATE, field) or '') or '' end
local p = redis.call('HMGET', STATE, 'policy_incarnation', 'policy_n', 'digest')
local counts = {}
for _, name in ipairs({'leased', 'completed', 'failed', 'retried', 'expired', 'evicted', 'dead', 'dropped', 'rerun', 'trained', 'validated'}) do
  counts[#counts + 1] = {name, number('c_' .. name)}
end
local function size(name, command, key) counts[#counts + 1] = {name, redis.call(command, key)} end
size('running', 'ZCARD', P .. (known.steps == 0 and 'vleases' or 'leases'))
size('validation_running', 'ZCARD', P .. 'vleases')
size('retry_waiting', 'ZCARD', P .. 'retry')
size('missing', 'ZCARD', P .. 'missing')
size('running_groups', 'ZCARD', RUNNING)
size('ready_groups', 'ZCARD', READY)
size('taken_groups', 'LLEN', TAKEN)
counts[#counts + 1] = {'open', number('open')}
counts[#counts + 1] = {'admitted', known.groups_per_step and admitted() or 0}
local pending = redis.call('LLEN', TAKEN) * (known.group_size or 0)

local reports, flat = {}, redis.call('HGETALL', P .. 'reports')
for i = 1, #flat, 2 do
  local report = cmsgpack.unpack(flat[i + 1])
  reports[#reports + 1] = {flat[i], math.max(0, now() - report[1]), report[2]}
end
local scores = {}
flat = redis.call('HGETALL', P .. 'scores')
for i = 1, #flat, 2 do scores[#scores + 1] = {flat[i], tonumber(flat[i + 1])} end
local staleness = {}
if value('stale_mean') ~= '' then staleness = {{'mean', value('stale_mean')}, {'max', value('stale_max')}} end
local info = redis.pcall('INFO', 'memory')
info = type(info) == 'string' and info or ''
local batch = value('reward_batch')
return cmsgpack.pack({
  {'step', number('trained')}, {'steps', known.steps or 0}, {'incarnation', number('incarnation')},
  {'policy', {p[1] and (p[1] .. '-' .. p[2]) or '', p[3] or '', number('trained')}},
  {'phase', redis.call('HGET', STATE, 'phase') or ''}, {'message', redis.call('HGET', STATE, 'message') or ''},
  {'counts', counts}, {'reports', reports}, {'validation', scores}, {'staleness', staleness},
  {'reward_mean', batch ~= '' and batch or value('reward_recent')},
  {'reward_recent', value('reward_recent')}, {'turns_recent', value('turns_recent')},
  {'progress', number('progress')}, {'stream_entries', redis.call('XLEN', STREAM)}, {'stream_pending', pending},
  {'memory_bytes', tonumber(string.match(info, 'used_memory:(%d+)') or 0)},
  {'max_memory_bytes', tonumber(string.match(info, 'maxmemory:(%d+)') or 0)},
})

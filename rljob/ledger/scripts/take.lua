-- ARGV: incarnation, step, groups -> {{group, evictions, {payload key, …}}, …}, or {reason, retry_after_seconds, facts}.
-- Where nothing is trained the last batch may be smaller, down to none: `all_collected`.
local step, want = tonumber(ARGV[2]), tonumber(ARGV[3])
fence(tonumber(ARGV[1]))
permit()
local archived = number('archived')
if step <= number('trained') then stop('STATE step ' .. step .. ' is trained already') end
if step > archived + 1 then stop('STATE step ' .. step .. ' before step ' .. (archived + 1) .. ' is archived') end
if step <= archived then
  -- The trainer finds no archive of steps that were archived once: their places are filled anew.
  untake()
  count('rerun', (archived - step + 1) * rule('groups_per_step') * rule('group_size'))
  set('archived', step - 1)
end

local function recorded()
  local batch = {}
  for _, group in ipairs(redis.call('LRANGE', TAKEN, 0, -1)) do
    local keys = {}
    for i, m in ipairs(members(group)) do keys[i] = m.k end
    local _, evictions = index_of(group)
    batch[#batch + 1] = {group, evictions, keys}
  end
  return cmsgpack.pack(batch)
end
if collects() then want = math.min(want, places(step)) end
local have = redis.call('LLEN', TAKEN)
local version, waited = step - 1, 0
local function not_yet(reason)
  local facts = {need = want - have, ready = redis.call('ZCARD', READY), running_groups = redis.call('ZCARD', RUNNING),
    running_episodes = redis.call('ZCARD', P .. 'leases'), waited_seconds = waited / 1000}
  return cmsgpack.pack({reason = reason, retry_after_seconds = 0.1, facts = facts})
end
if want == 0 then return not_yet('all_collected') end
if have >= want then return recorded() end
local bound = version - rule('max_staleness')
local function waiting(group) return redis.call('ZSCORE', READY, group) or redis.call('ZSCORE', RUNNING, group) end
for _, group in ipairs(redis.call('ZRANGEBYSCORE', OLDEST, '-inf', '(' .. bound)) do
  if waiting(group) and past(group, version) then evict(group) end
end
-- Policy `wait`: groups that the batch after this one could no longer hold must be in this one.
local function last_call()
  local groups = {}
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', OLDEST, '-inf', bound)) do
    local lo = redis.call('ZSCORE', RUNNING, group) and span(group)
    if lo and lo <= bound then groups[#groups + 1] = group end
  end
  return groups
end
if rule('on_stale') == 'wait' then
  local late = last_call()
  if #late > 0 then
    if number('wait_step') ~= step then set('wait_step', step, 'wait_since', now()) end
    waited = now() - number('wait_since')
    if waited < milliseconds('wait_seconds') then return not_yet('stale_groups') end
    for _, group in ipairs(late) do evict(group) end
  end
end
local ready = redis.call('ZRANGE', READY, 0, want - have - 1)
if #ready < want - have then return not_yet('groups') end
for _, group in ipairs(ready) do
  redis.call('ZREM', READY, group)
  redis.call('RPUSH', TAKEN, group)
end
set('taken_step', step)
progress()

local sum, worst, rewards, episodes = 0, 0, 0, 0
for _, group in ipairs(redis.call('LRANGE', TAKEN, 0, -1)) do
  local lo = span(group)
  local staleness = lo and math.max(0, version - lo) or 0
  sum, worst = sum + staleness, math.max(worst, staleness)
  for _, m in ipairs(members(group)) do rewards, episodes = rewards + m.r, episodes + 1 end
end
set('reward_batch', rewards / episodes)
if not collects() then set('stale_mean', sum / want, 'stale_max', worst) end
return recorded()

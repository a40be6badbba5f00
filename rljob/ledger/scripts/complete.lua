-- ARGV: body, worker, boot, episode, attempt, reward, oldest n, newest n, turns, info (JSON) -> accepted | already_done.
-- The client SETs the payload under the key `body`, with a time to live, in the same round trip: passed through Lua it would be
-- copied twice more, which at 165 KB takes 40 % more of the server's time. A full store refuses that SET, and the worker keeps
-- its payload.
local body, worker, boot, e, attempt = ARGV[1], ARGV[2], ARGV[3], parse(ARGV[4]), tonumber(ARGV[5])
local reward, lo, hi, turns = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
-- Few calls: at 8 workers this script is what the server does.
local group = redis.call('HMGET', e.key, e.field, 'done', 'size')
local m = group[1] and cmsgpack.unpack(group[1]) or nil
if not e.training and not m then
  -- A run that lost its leases (asynchronous fail-over) still knows its size.
  local v = redis.call('HMGET', e.run, 'rows', 'samples')
  if v[1] and e.row < tonumber(v[1]) and e.sample < tonumber(v[2]) then m = {f = 0, l = 0} end
end
if not m or m.s == 'x' or m.s == 'd' then
  redis.call('UNLINK', P .. body)
  local repeated = m and m.s == 'd' and m.c == attempt and m.w == worker and m.b == boot
  return cmsgpack.pack(repeated and 'accepted' or 'already_done')
end

if redis.call('PERSIST', P .. body) == 0 then stop('the payload did not arrive') end
m.x = redis.call('XADD', e.training and STREAM or (e.run .. ':stream'), '*', 'e', e.id, 'a', attempt, 'i', ARGV[10], 'k', body)
leave_queue(e, m)
m.s, m.c, m.w, m.b, m.k, m.r, m.lo, m.hi = 'd', attempt, worker, boot, body, reward, lo, hi

local function finish_group()
  local list = members(e.group)
  local same = #list > 1 -- a group of one has no spread to lack
  for _, other in ipairs(list) do same = same and other.r == list[1].r end
  redis.call('ZREM', RUNNING, e.group)
  if not (same and redis.call('HGET', CONFIG, 'zero_variance') == 'drop') then return make_ready(e.group, list) end
  -- Without a spread of rewards the group teaches nothing; the next index takes its place.
  forget(e.group)
  redis.call('HDEL', EVICTIONS, e.index)
  redis.call('SETBIT', P .. 'dropped_rows', e.index, 1)
  count('dropped')
end
local function moving(old, value)
  old = tonumber(old or value)
  return old + (value - old) * 0.04
end
if e.training then
  local done = tonumber(group[2]) + 1
  redis.call('HSET', e.key, e.field, cmsgpack.pack(m), 'done', done)
  local s = redis.call('HMGET', STATE, 'progress', 'c_completed', 'open', 'reward_recent', 'turns_recent')
  set('progress', (s[1] or 0) + 1, 'c_completed', (s[2] or 0) + 1, 'open', s[3] - 1, 'reward_recent', moving(s[4], reward),
    'turns_recent', moving(s[5], turns))
  if lo >= 0 and lo < (m.n or 0) then may_be_old(e.group, lo) end
  if done == tonumber(group[3]) then finish_group() end
else
  save(e, m)
  progress()
  count('validated')
  local v = redis.call('HMGET', e.run, 'sum', 'lo', 'hi')
  local oldest, newest = tonumber(v[2]), tonumber(v[3])
  if lo >= 0 then oldest = oldest < 0 and lo or math.min(oldest, lo) end
  redis.call('HSET', e.run, 'sum', tonumber(v[1]) + reward, 'lo', oldest, 'hi', math.max(newest, hi))
  redis.call('HINCRBY', e.run, 'done', 1)
  if rule('steps') == 0 then -- nothing is trained: scoring is the job's work
    local s = redis.call('HMGET', STATE, 'reward_recent', 'turns_recent')
    count('completed')
    set('reward_recent', moving(s[1], reward), 'turns_recent', moving(s[2], turns))
  end
end
return cmsgpack.pack('accepted')

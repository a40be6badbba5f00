-- ARGV: worker, boot, episode, attempt, reason, evidence -> {retry | dead | already_done, retry after ms}.
local e, attempt, reason, evidence = parse(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local LONGEST_PAUSE_MILLISECONDS = 3600000
permit()
local m = load(e)
-- Only the newest attempt counts: an older one lost its lease before, and that was counted then.
if not m or m.s == 'd' or m.s == 'x' or m.a ~= attempt then return cmsgpack.pack({'already_done', 0}) end
if m.s == 'w' then
  return cmsgpack.pack({'retry', math.max(0, tonumber(redis.call('ZSCORE', queue(e, 'retry'), e.id)) - now())})
end
count('failed')
m.f = m.f + 1
if m.f >= rule('max_attempts') then
  if e.training then kill(e.group, e.id, reason, evidence) else bury_sample(e, m, reason, evidence) end
  return cmsgpack.pack({'dead', 0})
end
local pause = math.min(LONGEST_PAUSE_MILLISECONDS, milliseconds('retry_backoff_seconds') * 2 ^ (m.f - 1))
leave_queue(e, m)
m.s = 'w'
redis.call('ZADD', queue(e, 'retry'), now() + pause, e.id)
save(e, m)
return cmsgpack.pack({'retry', pause})

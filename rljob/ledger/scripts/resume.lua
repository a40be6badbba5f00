-- ARGV: incarnation, step, archived step (-1: as the ledger knows it), then groups that stand in the archive -> nil.
local step, archived_step = tonumber(ARGV[2]), tonumber(ARGV[3])
fence(tonumber(ARGV[1]))
permit()
local old = number('archived')
local archived = math.max(step, archived_step >= 0 and archived_step or old)
local next_index = math.max(number('next_index'), archived * rule('groups_per_step'))
for i = 4, #ARGV do
  local index = index_of(ARGV[i])
  next_index = math.max(next_index, tonumber(index) + 1)
  if redis.call('ZSCORE', LIVE, ARGV[i]) then
    forget(ARGV[i])
    redis.call('LREM', TAKEN, 0, ARGV[i])
    count('trained', rule('group_size'))
    redis.call('HDEL', EVICTIONS, index)
  end
end
local taken_step = number('taken_step')
if taken_step > 0 and taken_step <= archived then
  -- Its trainer died after the manifest stood and before it could say so.
  acknowledge(taken_step)
elseif taken_step > 0 and taken_step ~= archived + 1 then
  untake()
end
if archived < old then count('rerun', (old - archived) * rule('groups_per_step') * rule('group_size')) end
set('trained', step, 'archived', archived, 'next_index', next_index)
redis.call('HDEL', STATE, 'wait_step')
-- Runs of steps that the surviving line has not reached score weights that are no more.
for _, run in ipairs(redis.call('ZRANGEBYSCORE', VALIDATIONS, '(' .. step, '+inf')) do purge_validation(run) end
return nil

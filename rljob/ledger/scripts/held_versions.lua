-- -> {version, …}: held by an engine, named by a lease or a validation run, or the newest.
local FORGET_AFTER_MILLISECONDS = 600000
permit()
local names = {}
local function name(incarnation, n) names[incarnation .. '-' .. n] = true end
for _, worker in ipairs(redis.call('SMEMBERS', P .. 'workers')) do
  local w = redis.call('HMGET', P .. 'w:' .. worker, 'held', 'seen')
  -- A worker that is gone for good must not hold disk for ever.
  if not w[2] or now() - tonumber(w[2]) > FORGET_AFTER_MILLISECONDS then
    redis.call('SREM', P .. 'workers', worker)
    redis.call('HDEL', P .. 'w:' .. worker, 'held')
  elseif w[1] and w[1] ~= '' then
    names[w[1]] = true
  end
end
each_lease(function(_, m) name(m.i, m.n) end)
for _, step in ipairs(redis.call('ZRANGE', VALIDATIONS, 0, -1)) do
  local v = redis.call('HMGET', P .. 'v:' .. step, 'incarnation', 'n')
  name(v[1], v[2])
end
local policy = redis.call('HMGET', STATE, 'policy_incarnation', 'policy_n')
if policy[1] then name(policy[1], policy[2]) end
local list = {}
for version in pairs(names) do list[#list + 1] = version end
return cmsgpack.pack(list)

-- -> {version | "", digest, steps trained}.
local p = redis.call('HMGET', STATE, 'policy_incarnation', 'policy_n', 'digest')
return cmsgpack.pack({p[1] and (p[1] .. '-' .. p[2]) or '', p[3] or '', number('trained')})

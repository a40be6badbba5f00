-- ARGV: 1 | 0 -> nil.
permit()
if ARGV[1] == '1' then set('draining', 1) else redis.call('HDEL', STATE, 'draining') end
return nil

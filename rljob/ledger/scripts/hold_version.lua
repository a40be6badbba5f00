-- ARGV: worker, boot, version ("" none) -> nil.
permit()
redis.call('HSET', register(ARGV[1], ARGV[2]), 'held', ARGV[3])
return nil

-- ARGV: component, report (JSON) -> nil.
permit()
redis.call('HSET', P .. 'reports', ARGV[1], cmsgpack.pack({now(), ARGV[2]}))
return nil

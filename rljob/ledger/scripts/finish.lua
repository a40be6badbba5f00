-- ARGV: incarnation, phase, message -> nil.
fence(tonumber(ARGV[1]))
permit()
set('phase', ARGV[2], 'message', ARGV[3])
return nil

-- ARGV: incarnation -> nil, or the fencing error.
fence(tonumber(ARGV[1]))
return nil

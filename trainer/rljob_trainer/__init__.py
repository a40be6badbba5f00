"""The trainer room: stream in, weights out; the only room with torch."""

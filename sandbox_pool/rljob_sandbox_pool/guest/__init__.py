"""What runs inside a sandbox, as its PID 1. Standard library only; imports nothing but itself.

wire.py       bytes → requests, answers → bytes                       (no I/O)
app.py        routes, who may call what, repeated requests            (no I/O)
checks.py     request bodies: every field has a type and a bound      (no I/O)
claims.py     the lifecycle of a sandbox: one claim at a time         (no I/O)
memory.py     answers that are kept for a repeat                      (no I/O)
loop.py       descriptors, timers, children: one thread, one selector
server.py     connections
processes.py  commands with limits
files.py      files, with the rights of the agent's user
reset.py      back to pristine, verified
system.py     what the kernel is asked for;   seccomp.py  what nobody here may ask it for
main.py       puts it together
"""

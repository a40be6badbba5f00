"""What runs inside a sandbox, as its PID 1. Standard library only; imports nothing but itself.

wire.py       bytes → requests, answers → bytes
app.py        routes, who may call what, repeated requests          (no I/O)
claims.py     the lifecycle of a sandbox: one claim at a time       (no I/O)
loop.py       sockets, timers, children: one thread, one selector
processes.py  commands with limits       files.py  files as the agent's user       reset.py  back to pristine, verified
system.py     what the kernel is asked for       main.py  puts it together
"""

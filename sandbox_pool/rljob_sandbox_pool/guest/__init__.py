"""What runs inside a sandbox, as its PID 1. Standard library only; imports nothing but itself.

wire.py stream.py      bytes → requests, answers → bytes, bodies in pieces      (no I/O)
app.py routes.py       who may call what, repeated requests                     (no I/O)
commands.py shell_routes.py transfers.py   the routes by group                  (no I/O)
checks.py              request bodies: every field has a type and a bound       (no I/O)
claims.py              the lifecycle of a sandbox: one claim at a time          (no I/O)
memory.py              answers that are kept for a repeat                       (no I/O)
tunnel.py              many streams over one connection                         (no I/O)
loop.py                descriptors, timers, children: one thread, one selector
server.py              connections;   tunnels.py  ports of the loopback that lead out over one of them
children.py pipes.py   processes of commands and what they say
processes.py           commands with limits;   shells.py shell*.py  shells that keep their state
files.py               files, with the rights of the agent's user
archives.py            trees: archive.py  tar into a folder;   pack.py  out of one
folders.py seed.py     trees of files copied and emptied: before a sandbox starts, and when it is reset
reset.py               back to pristine, verified;   writable.py  folders of the image;   ports.py  who listens
system.py              what the kernel is asked for;   seccomp.py  what nobody here may ask it for
main.py pod.py         put it together: on one machine, in a pod
"""

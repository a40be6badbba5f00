"""The Kubernetes API on httpx, as much of it as rljob needs: calls with deadlines, an informer, a Lease.

config.py     where the API server is and who we are      (in a pod, or from a kubeconfig)
resources.py  the kinds that rljob reads and writes, and their paths
errors.py     what went wrong, and whether to ask again
calls.py      one call with its deadline, retries and token; streams
client.py     get, list, watch, create, apply, patch, delete
informer.py   a local copy of what a selector selects, kept by list and watch
lease.py      one leader at a time
"""

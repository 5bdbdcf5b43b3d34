"""Object-store access: one small ABC, one backend a file, one policy for retries.

``open_store(url, origin)`` gives the store of a URL's bucket with that policy applied.
"""

"""The node daemon: one process that fetches each object once and lends it to every client of the node.

:mod:`.lifecycle` runs it, :mod:`.control` talks to clients, :mod:`.engine` does the work and needs no socket.
"""

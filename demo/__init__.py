"""The main job, end to end: train from S3 through the cache, kill everything, resume exactly, compare.

``python -m demo --out demo-out`` tells the whole story (:mod:`.story`); :mod:`.train` is the training script that users
copy, and the only module here that is about training. The others make data, start and kill processes, and check.
"""

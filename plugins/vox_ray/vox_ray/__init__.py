"""vox-ml-ray: the launcher `ray`, a run's ranks as workers of Ray Train.

launch.py    the command's side: the cluster, Ray's trainer, the result
worker.py    a worker's side: one rank, watched
"""

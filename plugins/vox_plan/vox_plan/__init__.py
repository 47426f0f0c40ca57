"""vox-ml-plan: predict memory and time of a run, measure the fastest settings of this machine, and
start the run's processes.

cli.py              vox plan
planner.py          settings -> PlanReport (report.py); speed.py: how long a run takes
advise.py           the hooks; vox_advise: refusal, warning and knobs for vox train
launch.py, jobs.py   vox train --processes, --emit
memory_forecast.py  a planned run against its device; memory.py, architecture.py,
                    activations.py: the prediction
tuning.py           --tune refresh; stopwatch.py, tuning_cache.py
"""

"""Plugins installed, upgraded and removed with uv: planned whole, done whole or undone.

    plan = plan_install(["cpu"])            # plan.py: reads only
    plan.changes                            # names, versions, sizes
    apply(plan)                             # apply.py: fetch, check, install, check again

environment.py finds where to install and what is there, requirements.py turns ids and paths into
requirements, uv.py runs uv with the indexes of the user's pip configuration,
undo.py keeps what a change replaces and puts it back. No plugin is imported.
"""

"""Engines of `vox serve` that are other programs, behind its extension point.

proxy.py       the same endpoints over another program, and its verification
programs.py    llama.cpp's server and vLLM: find them, their options and requests
keeper.py      start the program, wait until it is healthy, start it again
minder.py      run the program, and end it when vox ends
xllama.py      llama-server out of the package xllamacpp
"""

"""Question-answer rows from what others have written: Python sources and Markdown.

Pure readers of files: nothing that is read is imported or run. What is here makes rows; writing
them is the business of `extract.py`.
"""

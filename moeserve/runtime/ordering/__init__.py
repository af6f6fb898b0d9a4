"""The order of a group's steps: which jobs are in which step, when one begins, and what is under way. The
head orders those of a group of several; a member that is alone in its group orders its own.
"""

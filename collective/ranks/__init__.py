"""What keeps ranks together: agreeing on every run, ending, leaving and failing alike, meeting
outside of runs.
"""

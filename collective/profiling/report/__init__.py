"""Draws where the time of training steps goes: one HTML file of the profile of a job.

    collective report profile             # writes profile/report.html
    collective report before after        # two profiles side by side

`scope(profile=…)` writes the same page when the profiled steps are over. `profile.py` reads
split.json, where it was saved; `page.py` makes the page of it. Nothing here needs TensorFlow.
"""

"""Draws where the time of training steps goes: one HTML file for the profile of a job.

    collective report profile             # writes profile/report.html
    collective report before after        # two profiles side by side

`scope(profile=…)` writes the same page once the profiled steps are over. `profile.py` reads
split.json, which holds the profile; `page.py` makes the page. Nothing here needs TensorFlow.
"""

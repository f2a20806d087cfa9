"""The planner: exact cache sizes of any model, and the pipeline to choose, before anything is loaded.

Everything here is arithmetic over a ``config.json``. Nothing imports torch or transformers, so
``kvloom plan`` answers in well under two seconds. Formulas are derived in ``docs/sizing.md``.

The way of an answer::

    sources (which config) → readers (config → Architecture) → accounting (bytes at a context)
      → parallel (bytes per device) → fit → roofline → choose → handover → report
"""

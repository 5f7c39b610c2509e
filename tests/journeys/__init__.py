"""Ten journeys, each from an empty folder to a result, as a user would type them.

In an environment that has memengine, from the root of the checkout, or in a new one, into which
README's first command installs it::

    python -m tests.journeys
    python -m tests.journeys --fresh

Five are the tutorials of ``docs/tutorials``, carried out as they stand: files are written, Python
is run, commands are typed, and print what stands below them. Five are the scripts in this folder,
which say what they expect by themselves.
"""

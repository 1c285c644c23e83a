"""The version, where the build, the files and the command line read it."""

__version__ = "0.1.0"

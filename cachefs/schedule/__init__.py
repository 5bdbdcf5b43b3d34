"""Which objects to bring in next, and which entries to give up: decisions from what jobs declared they will read.

Pure: no I/O, no clock. The daemon tells a :class:`Scheduler` what is held and how far jobs have come, and asks it.
"""

from .incoming import Incoming
from .plan import MOST_POSITION, Course, Plan
from .s3fifo import S3Fifo
from .scheduler import Scheduler, Wanted

__all__ = ["MOST_POSITION", "Course", "Incoming", "Plan", "S3Fifo", "Scheduler", "Wanted"]

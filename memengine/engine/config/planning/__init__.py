"""Plans of a config: what it leaves open, what each plan costs, and the fastest that fits."""

from memengine.engine.config.planning.planner import Planner, budget_for, usable_bytes

__all__ = ['Planner', 'budget_for', 'usable_bytes']

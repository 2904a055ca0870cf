from memo.planner import plan

plan.PLANNING_S = 1.0  # here and in ranks that run a function of a test: plans need not be the best ones

"""Planning: find the policy, ask it for a plan, check the plan, and check that it fits the
budget."""

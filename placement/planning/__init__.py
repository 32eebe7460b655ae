"""Plans: the policy is asked, its answer checked, and the budget that it has to fit."""

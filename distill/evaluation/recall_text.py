"""Words and sentences that synthetic recall examples are made of; all written for this purpose."""

from __future__ import annotations

FILLER = (
    "The road to the coast was closed for most of the winter.",
    "A ferry crosses the bay twice a day when the weather allows it.",
    "Most of the houses in the valley were built from local stone.",
    "The library keeps its oldest maps in a room without windows.",
    "Several farms along the river grow barley and oats.",
    "The bakery opens before sunrise and closes at noon.",
    "A small museum shows tools that fishermen used long ago.",
    "In spring the meadows are covered with yellow flowers.",
    "The old bridge was replaced after the flood.",
    "Children walk to school along a path between the gardens.",
    "The town hall has a clock that runs a few minutes late.",
    "Every autumn a market is held in the main square.",
    "The train stops here only when somebody asks the driver.",
    "Two lighthouses mark the entrance of the harbour.",
    "The mill has not been used since the dam was finished.",
    "Snow usually stays on the northern slopes until May.",
    "A choir rehearses in the church on Thursday evenings.",
    "The best view of the lake is from the hill behind the inn.",
    "Boats are painted and repaired before the season starts.",
    "Rain fell all week and the fields were too wet to plough.",
    "The post office moved to a new building near the station.",
    "Some of the trees in the park are more than a century old.",
    "The doctor visits the island once a month.",
    "A narrow stair leads from the kitchen to the cellar.",
    "Wool from these hills is spun and dyed in the village.",
    "The council decided to plant lime trees along the avenue.",
    "Foxes are sometimes seen at the edge of the forest.",
    "The hotel has twelve rooms and a garden with a fountain.",
    "A retired teacher writes a column for the local paper.",
    "The wind turned to the east and the air became dry.",
    "Visitors are asked to leave their bicycles by the gate.",
    "The workshop repairs violins, clocks and sewing machines.",
)

KEYS = (
    "amber", "anchor", "apple", "arrow", "basket", "beacon", "bottle", "bridge", "button",
    "candle", "canyon", "carpet", "castle", "cedar", "cherry", "circle", "copper", "cotton",
    "crystal", "desert", "dragon", "eagle", "ember", "falcon", "feather", "forest", "garden",
    "ginger", "glacier", "granite", "hammer", "harbor", "hazel", "honey", "island", "ivory",
    "jacket", "jungle", "kettle", "ladder", "lantern", "lemon", "magnet", "maple", "marble",
    "meadow", "mirror", "needle", "ocean", "olive", "orchid", "pepper", "pillow", "planet",
    "pocket", "rabbit", "ribbon", "river", "saddle", "silver", "spider", "temple", "thunder",
    "tiger", "tunnel", "velvet", "violet", "walnut", "window", "winter",
)  # fmt: skip

STATEMENT = "The secret number of the {key} is {value}."
QUESTION = "Here is the number that was asked for. The secret number of the {key} is"

"""Five queries and ten passages that the reranking tests share; the n-th passage answers the n-th query."""

QUERIES = (
    "How do I keep tomatoes from getting blight?",
    "When does the ferry to the island leave on Sundays?",
    "What should I do if the boiler loses pressure?",
    "Who painted the mural at the railway station?",
    "How long does sourdough need to rise?",
)
PASSAGES = (
    "Blight spreads on wet leaves. Water tomato plants at the base in the morning, take off the "
    "lowest leaves once the plants stand knee-high, and leave half a metre between them so that the "
    "foliage dries quickly. Burn what is already spotted; it must not go on the compost heap.",
    "The boats run by another timetable at the weekend. On Sundays the ferry to the island leaves at "
    "nine, at one and at half past five; the last boat back is at seven. Bicycles travel free, dogs "
    "need a ticket, and the crossing takes about forty minutes in calm weather.",
    "If the needle of the gauge stands below one bar, the boiler has lost pressure. Open the filling "
    "loop slowly until it shows one and a half, close both valves, and bleed the radiators upstairs. "
    "If it falls again within a week, look for a leak at the relief valve.",
    "The mural in the hall of the railway station was painted in 1936 by Ada Lindqvist and two of her "
    "pupils. It shows workers on the harbour bridge. It was whitewashed during the war and uncovered "
    "again only when the roof was repaired in the nineties.",
    "A sourdough loaf takes its time: four to five hours of bulk rise at room temperature, with a "
    "fold every half hour at first, then a night in the refrigerator in its basket. A poke with a "
    "finger should spring back slowly before it goes into the oven.",
    "The library opens at ten on weekdays and stays open until eight on Thursdays. Members may borrow "
    "twelve books for four weeks and renew them twice, by telephone or at the desk, unless another "
    "reader has asked for them in the meantime.",
    "Our office printer takes A4 from the second tray only. To clear a jam, open the rear cover, pull "
    "the paper straight out with both hands, and run the cleaning page from the menu before you print "
    "anything else on it.",
    "The village choir meets in the old school on Wednesday evenings. New voices are welcome, above "
    "all tenors; nobody has to sing alone. In spring the choir gives two concerts, and all that is "
    "collected goes to the repair of the organ.",
    "Lost property is kept at the depot for three months. Describe the thing as exactly as you can, "
    "say on which line you left it and when, and bring a document with your name on it when you come "
    "to collect it from the counter.",
    "Snow is cleared from the main road first, then from the bus routes, and from side streets only "
    "when more than ten centimetres have fallen. Householders look after the pavement in front of "
    "their own gate until eight in the evening.",
)

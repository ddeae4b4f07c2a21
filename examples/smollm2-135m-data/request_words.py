"""Words for the forms of requests."""

import random
import re


_WORDS = """first: Anna Ben Clara David Emma Felix Grace Henry Ida James Kate Liam Mia Noah Olga Paul Rosa Sam Tina
last: Adams Baker Chen Diaz Evans Fischer Garcia Hill Ito Jones Khan Lopez Meyer Novak Owens Patel Rossi Smith
town: Oslo Paris Boston Lima Cairo Delhi Tokyo Madrid Dublin Prague Toronto Sydney Nairobi Lisbon Seoul
job: teacher nurse baker lawyer pilot farmer painter engineer plumber editor chemist driver librarian
goods: apples notebooks chairs lamps tickets bicycles shirts cameras candles plants radios mugs
month: January February March April May June July August September October November December
weekday: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
who: child student teacher beginner grandmother manager tourist scientist friend farmer nurse colleague neighbour
feeling: happy proud tired nervous curious angry grateful bored surprised worried hopeful lonely
colour: red blue green yellow white black grey brown purple orange
animal: cat dog horse parrot rabbit hedgehog owl turtle fox goat donkey hamster penguin whale elephant bee squirrel
company: Northwind|Blue Harbor|Maple & Sons|Sunrise Foods|Ironclad|Paper Crane|Lakeside Books|Quickstep|Green Valley
dish: pancakes|lentil soup|apple pie|fried rice|tomato salad|mushroom risotto|chicken curry|banana bread|an omelette
dish: pasta with pesto|fish tacos|potato gratin|vegetable stew|fruit salad|chocolate cake|hummus|pumpkin soup|goulash
ingredient: eggs|rice|tomatoes|cheese|spinach|carrots|beans|chicken|onions|potatoes|mushrooms|lemons|honey|oats|tofu
ingredient: walnuts|garlic|peppers|noodles|yoghurt|apples|butter|salmon|basil|bread|chickpeas|coconut milk|peas
place: the library|the town hall|the old bridge|the train station|the museum|the harbour|the school gym|the bakery
place: the city park|the swimming pool|the cinema|the hospital|the market square|the community garden|the airport
hobby: painting|chess|running|gardening|knitting|photography|birdwatching|cooking|hiking|pottery|sailing|climbing
hobby: dancing|fishing|writing poems|playing the guitar|astronomy|cycling|swimming|model trains|calligraphy|juggling
project: moving to a new flat|a garage sale|repainting the kitchen|planting a vegetable garden|a school play
project: starting a blog|a family reunion|building a birdhouse|learning to drive|a charity run|a book club
project: cleaning the attic|opening a small cafe|a camping trip|training for a race|a science fair|writing a novel
project: looking for a new job|adopting a dog|repairing a bicycle|organizing old photographs|a neighbourhood festival
event: birthday party|wedding|concert|workshop|open day|farewell lunch|book reading|quiz night|barbecue|flea market
event: graduation|housewarming party|training course|anniversary dinner|sports day|film evening|cooking class
product: coffee machine|running shoe|water bottle|desk lamp|backpack|radio|rain jacket|alarm clock|board game
product: electric toothbrush|folding chair|notebook|tea kettle|phone case|yoga mat|umbrella|suitcase|garden hose
subject: the budget|the new website|office rules|the summer party|customer complaints|hiring|safety at work|parking
subject: the delivery delay|next year's goals|the printer|the school trip|waste in the kitchen|overtime|the new logo
subject: the survey results|working from home|the move to a new office|meeting times|the holiday plan|a broken lift
business: bakery|bookshop|bicycle repair shop|flower shop|pet hotel|language school|coffee cart|yoga studio|toy shop
business: cleaning service|travel agency|barber shop|vegan restaurant|board game cafe|music school|garden centre
thing: tea|coffee|a train|a car|a book|a film|a cat|a dog|summer|winter|a city|a village|a laptop|a tablet|a bicycle
thing: a phone call|an email|milk|juice|a pen|a pencil|cash|a credit card|the sea|the mountains|a house|a flat
reason: I was ill|the train was late|my car broke down|I forgot the date|the heating failed|I had to work late
reason: my phone was lost|the weather was bad|a pipe burst|I mixed up two appointments|our flight was cancelled
quality: small|old|quiet|cheap|modern|beautiful|strange|heavy|reliable|popular|comfortable|noisy|simple|bright
verb: bring|send|find|repair|sell|paint|clean|collect|check|count|borrow|return|order|pack|move
listed: animals that live in the desert|uses for an old jar|ways to save water|board games for two|names for a parrot
listed: breakfasts without sugar|reasons to read every day|sports that need no ball|rivers in Europe|words for big
listed: presents under 20 dollars|questions for a first date|jobs that are done outdoors|indoor plants|good manners
listed: things to do on a rainy day|foods rich in iron|fairy tales|inventions of the 20th century|musical instruments
listed: synonyms for tired|countries in Africa|things in a first aid kit|household chores|kinds of cheese
listed: songs for a road trip|trees with edible fruit|skills for an office job|ways to thank a teacher|warm colours"""
_GROUPS = """fruits: apple banana cherry grape lemon mango orange peach pear plum
animals: bear camel dolphin eagle frog giraffe lion mouse snake tiger
countries: Brazil Canada Egypt France India Japan Kenya Mexico Norway Peru
tools: axe chisel drill hammer ladder nail pliers saw screwdriver wrench
clothes: belt coat glove hat jacket scarf shirt shoe skirt sock
vegetables: bean cabbage carrot garlic leek onion pea potato pumpkin radish
furniture: armchair bed bench bookcase chair cupboard desk shelf sofa table
instruments: cello clarinet drum flute guitar harp piano trumpet tuba violin
sports: archery boxing cricket fencing golf hockey judo rowing rugby tennis
vehicles: bus ferry lorry moped plane scooter ship taxi train tram
professions: architect butcher carpenter dentist florist gardener judge miner tailor waiter
materials: clay copper cotton glass iron leather paper silk steel wool"""
WORDS: dict[str, list[str]] = {}
for _line in _WORDS.splitlines():
    _name, _, _some = _line.partition(": ")
    WORDS.setdefault(_name, []).extend(_some.split("|") if "|" in _some else _some.split())
for _name, _numbers in {
    "n": range(2, 13),
    "age": range(18, 91),
    "day": range(1, 29),
    "price": range(2, 901),
    "number": range(1003, 100_000, 97),
    "hour": range(1, 10),
    "hundreds": range(100, 1000, 100),
    "percent": range(5, 100, 5),
    "minutes": range(10, 100, 5),
    "year": range(1950, 2024),
}.items():
    WORDS[_name] = list(map(str, _numbers))
GROUPS = {name: words.split() for name, words in (line.split(": ") for line in _GROUPS.splitlines())}


class Words(dict):
    """Words for `str.format_map`: a name, such as `town`, draws once; `town2` draws another word for a town."""

    def __init__(self, draw: random.Random, **chosen: str):
        super().__init__(chosen)
        self.draw = draw

    def __missing__(self, name: str) -> str:
        table = WORDS[name.rstrip("23")]
        self[name] = self.draw.choice([word for word in table if word not in self.values()] or table)
        return self[name]

    def fill(self, form: str) -> str:
        return re.sub(r"\ba (?=[aeioAEIO]\w)", "an ", form.format_map(self))

    def groups(self) -> None:
        """Draws what is sorted: `items` of one group, `mixed` ones of two, and `odd` ones, all but one of a group."""
        (self["group"], items), (self["group2"], strangers) = self.draw.sample(sorted(GROUPS.items()), 2)
        items = self.draw.sample(items, 6)
        strangers = self.draw.sample(strangers, 3)
        self["items"] = ", ".join(items[: self.draw.randint(3, 6)])
        for name, mixed in {"mixed": items[:3] + strangers, "odd": items[:3] + strangers[:1]}.items():
            self.draw.shuffle(mixed)
            self[name] = ", ".join(mixed)
        self["numbers"] = ", ".join(str(self.draw.randint(1, 999)) for _ in range(self.draw.randint(4, 8)))

"""
Requests made by rules, of which no two are alike: code, JSON, rewriting, questions; and problems of `reasoning-gym`.

Beside what the target asks itself (`dflash prompts`), they see to it that every kind has its share.
"""

import random
import re


LANGUAGES = ("Python", "Python", "Python", "Python", "JavaScript", "Java", "C++", "Go", "Rust", "TypeScript")
CODE_TASKS = """reverse a linked list|count the vowels in a string|check whether a number is prime
merge two sorted lists|find the longest word in a sentence|compute the factorial of a number
remove duplicates from a list|flatten a nested list|read a CSV file and sum one column
sort a dictionary by its values|find the second largest number in a list|check whether a string is a palindrome
convert Celsius to Fahrenheit|generate the first n Fibonacci numbers|count how often each word occurs in a text
implement binary search|implement a stack with push and pop|rotate a matrix|find all pairs that add up to a target
validate an email address|parse a date in the format YYYY-MM-DD|shuffle a deck of cards
compute the greatest common divisor of two numbers|implement bubble sort|implement quicksort|download a web page
write a list of numbers to a file|find the intersection of two lists|compute a moving average
group words that are anagrams|check whether brackets are balanced|count the lines of a file
implement a queue with two stacks|transpose a table|find the missing number in a sequence|compute compound interest
format a number with thousands separators|roll two dice|convert a Roman numeral to an integer
encode a text with a Caesar cipher|implement a simple bank account class|print a multiplication table
compute the area of a circle|traverse a binary tree in order|insert a node into a binary tree
find the shortest path in a graph|memoize a recursive function|retry a request three times
measure the time of a call|split a list into chunks of equal size|compute the median of a list
find the most common element|capitalise every word|convert a list of pairs into a dictionary
check whether two strings are anagrams|sum the digits of a number|compute the Hamming distance of two strings
convert a number to binary|find the largest rectangle in a histogram|implement a timer that counts down
draw a triangle of stars|compute the dot product of two vectors|mask a credit card number
replace all spaces by underscores|filter the even numbers of a list|find all files with a given extension
parse a query string|simulate a coin toss|compute the distance of two points|cache the results of a slow call
log errors to a file|count the words in a paragraph|zip two lists into one|clamp a number between two limits
find the first repeated character"""
CODE_FORMS = (
    "Write a {language} function to {task}.",
    "How do I {task} in {language}?",
    "Write {language} code to {task}, with comments.",
    "Show me a short {language} program to {task}.",
    "I need to {task} in {language}. Can you help me?",
    "Explain step by step how to {task} in {language}.",
    "Write a {language} function to {task} and a unit test for it.",
    'Complete this function:\n\n```python\ndef {name}({argument}):\n    """{sentence}."""\n```',
    'from typing import List\n\ndef {name}({argument}):\n    """{sentence}.\n    """\n\nWrite its body.',
    "What is a good way to {task} in {language}, and how fast is it?",
)
ARGUMENTS = ("text: str", "numbers: List[int]", "values: list", "n: int", "items", "a, b", "data: dict", "path: str")
THINGS = """person:name,age,email,city,occupation,phone|book:title,author,year,genre,pages,isbn
recipe:name,ingredients,steps,minutes,servings|car:make,model,year,colour,mileage,price
movie:title,director,year,actors,rating|city:name,country,population,area,mayor
product:id,name,price,currency,stock,tags|order:id,customer,items,total,date,status
event:title,date,place,guests,price|song:title,artist,album,seconds,genre|student:name,grade,courses,average,school
flight:number,origin,destination,departure,seats|hotel:name,stars,address,rooms,breakfast
invoice:number,date,customer,positions,total|pet:name,species,age,owner,vaccinated
weather report:city,temperature,humidity,wind,forecast|server:host,port,protocol,timeout,users
restaurant:name,cuisine,rating,address,menu|job offer:title,company,salary,location,skills
planet:name,radius,moons,distance,atmosphere|game:title,platform,players,price,age
plant:name,height,light,water,toxic|football match:home,away,score,date,stadium
employee:id,name,department,salary,manager|museum:name,city,exhibitions,price,hours|sensor:id,type,unit,value,time
bank account:owner,iban,balance,currency,transactions"""
JSON_FORMS = (
    "Return a JSON object for a {thing} with the fields {fields}.",
    "Write a JSON array of {n} {thing}s, each with {fields}.",
    "Give me an example of a {thing} as JSON. Use the keys {fields}.",
    "Generate JSON that describes a {thing}: {fields}. Answer with JSON only.",
    "Write a JSON schema for a {thing} with {fields}.",
    "Create a table of {n} {thing}s with the columns {fields}.",
    "Make up {n} {thing}s and return them as a JSON list with {fields}.",
)
FACTS = (
    "{first} {last} is {age} years old, lives in {town} and works as a {job}.",
    "{first} {last} ({age}), a {job} from {town}, bought {n} {goods} for {price} dollars on {month} {day}.",
    "On {month} {day}, {first} {last} and {first2} {last2} meet in {town} to talk about {goods}.",
    "Order {number}: {n} {goods}, {price} dollars each, to {first} {last} in {town}.",
    "The {job} {first} {last} can be reached at {number} or in {town} until {month} {day}.",
)
FACT_FORMS = (
    "Convert the following text into JSON: {fact}",
    "Extract the names, places and numbers as JSON: {fact}",
    "{fact}\n\nReturn this information as a JSON object.",
    "Turn this into JSON with suitable keys.\n\n{fact}",
)
_WORDS = """first: Anna Ben Clara David Emma Felix Grace Henry Ida James Kate Liam Mia Noah Olga Paul Rosa Sam Tina
last: Adams Baker Chen Diaz Evans Fischer Garcia Hill Ito Jones Khan Lopez Meyer Novak Owens Patel Rossi Smith
town: Oslo Paris Boston Lima Cairo Delhi Tokyo Madrid Dublin Prague Toronto Sydney Nairobi Lisbon Seoul
job: teacher nurse baker lawyer pilot farmer painter engineer plumber editor chemist driver librarian
goods: apples notebooks chairs lamps tickets bicycles shirts cameras candles plants radios mugs
month: January February March April May June July August September October November December"""
WORDS = {name: words.split() for name, words in (line.split(": ") for line in _WORDS.splitlines())}
STYLES = """in a formal tone|in simple words|as a question|in the past tense|in the future tense|more politely
in one short sentence|for a child|in the passive voice|as a headline|as a tweet|with more detail
more enthusiastically|as bullet points|in the first person|so that it is easier to read|as advice
without adjectives|in a friendly tone|as a warning"""
REWRITE_FORMS = (
    "Rewrite the following sentence {style}: {text}",
    "Rewrite this {style}.\n\n{text}",
    'Please say this {style}: "{text}"',
    "Correct the grammar of this text: {broken}",
    "Summarize the following text in one sentence.\n\n{long}",
    "Summarize this: {long}",
    "Paraphrase: {text}",
    "Shorten this text.\n\n{long}",
    "Edit the following text so that it is clear and concise:\n\n{long}",
    "Which three words are the most important in this text? {long}",
)
TOPICS = """photosynthesis|inflation|black holes|the French Revolution|vaccines|machine learning|the water cycle
plate tectonics|supply and demand|the immune system|gravity|democracy|evolution|climate change|the stock market
electric cars|sleep|meditation|the Roman Empire|renewable energy|quantum computing|the human heart|volcanoes
nutrition|jazz|impressionism|chess|recycling|the internet|blockchain|antibiotics|bees|coral reefs|the moon landing
Shakespeare|the periodic table|taxes|insurance|solar eclipses|friendship|time management|public speaking
the scientific method|object-oriented programming|databases|operating systems|neural networks|photography|gardening
coffee|bread baking|marathon training|job interviews|learning a language|minimalism|remote work|city planning
tea ceremonies|ancient Egypt|dinosaurs|the Olympic Games|opera|architecture|robots|space stations|stress
good habits|saving money|first aid|weather forecasts|rivers|deserts|migration of birds|whales|the printing press"""
CHAT_FORMS = (
    "What is {topic}?",
    "Explain {topic} to a {who}.",
    "Give me {n} facts about {topic}.",
    "Why does {topic} matter?",
    "What should a {who} know about {topic}?",
    "Write a short poem about {topic}.",
    "I want to learn about {topic}. Where do I start?",
    "Write a short story about a {who} and {topic}.",
    "What are the pros and cons of {topic}?",
    "How has {topic} changed over time?",
    "Compare {topic} and {topic2}.",
    "Give me {n} tips on {topic}.",
    "List {n} questions that a {who} may ask about {topic}.",
    "Write an email to a {who} about {topic}.",
    "What is the difference between {topic} and {topic2}?",
    "Write an introduction to an essay on {topic} for a {who}.",
    "Describe {topic} in {n} sentences.",
    "What is the most common mistake people make about {topic}?",
    "Make a plan for a week of learning about {topic}.",
)
WHO = "child student teacher beginner grandmother manager tourist scientist friend farmer nurse colleague neighbour"
# Without gsm_symbolic, which rewords the test set of GSM8K.
PROBLEMS = """basic_arithmetic*3 chain_sum*2 calendar_arithmetic decimal_arithmetic gcd*2 lcm*2 simple_equations*3
fraction_simplification*2 prime_factorization*2 simple_geometry*2 leg_counting number_sequence time_intervals
products*2 aiw base_conversion complex_arithmetic coin_flip*2 count_bits family_relationships syllogism dice
letter_counting spell_backward sentence_reordering number_filtering word_sorting"""
STORIES = """{first} earns {price} dollars a week and saves {percent} percent of it. How much is saved after {n} weeks?
A {job} works {n} hours a day for {age} dollars an hour. How much does the {job} earn in {day} days?
A train leaves {town} at {hour} o'clock and drives {price} miles at {age} miles an hour. When does it arrive?
{first} reads {n} pages a day of a book of {price} pages. How many days does {first} need?
{goods} cost {n} dollars each. {first} pays for {day} of them with a note of {hundreds} dollars. How much is left?
A garden is {age} feet long and {n} feet wide. How many feet of fence does it need, and what is its area?
{first} and {first2} share {price} {goods}. {first} gets {n} more than {first2}. How many does each get?
A recipe for {n} people takes {age} grams of flour. How much flour does {first} need for {day} people?
In {town} it is {day} degrees at noon, and the temperature falls by {n} degrees an hour. What is it after {hour} hours?
{first} is {n} years older than {first2}. Together they are {age} years old. How old is each of them?
A shop in {town} sells {price} {goods} in {month}, and {percent} percent more a month later. How many is that?
{first} cycles {n} miles to work and back, {day} days a month. How many miles is that in a year?
A tank holds {price} litres. A pump fills {n} litres a minute. How long does it take until the tank is half full?
Of {price} {goods}, {percent} percent are broken. The rest is packed into boxes of {n}. How many boxes are full?
A class of {age} has {n} more girls than boys. How many girls are there?
{first} runs {n} laps of {hundreds} metres in {day} minutes. What is the average speed in metres a minute?"""
_TERSE = re.compile(  # what asks for the result alone, which most problems lose
    r"\s*(Give (only|the)|Reply (with )?only|Reply with just|Only reply|Respond only|Return only|Do not give|Answer in"
    r"|Please respond)[^.]*\.(?=\s|$)",
)
STEPS = (
    "",
    "",
    " Show your steps.",
    " Explain your answer.",
    " Let's think step by step.",
    "\n\nSolve it step by step.",
)
FOLLOW_UPS = {
    "code": """Now add type hints and a docstring.|Can you write a test for it?|Rewrite it in {language}.
What is its time complexity?|What happens if the input is empty?|Explain the code line by line.
Can you make it shorter?|Add error handling.|Now do it without a loop.
Rename the variables so that they are clearer.|Is there a bug in it?|Show me how to call it, with the output.
Make it faster.|Turn it into a class.""",
    "math": """Are you sure? Check your result.|Explain the second step in more detail.
What if the first number was {n}?|Give me a similar problem.|Can you solve it in another way?
Write the result as a sentence.|How would you explain this to a child?|Double the result and add {n}.
Which rule did you use?|Now give me only the final number.|What is the result divided by {n}?
Write a Python function that computes this.""",
    "json": """Add a field for the date.|Now give me {n} more.|Return it as YAML.|Remove the last field.
Make it a list of {n} objects.|Explain each field.|Write Python code that reads this.|Sort the keys by name.
Convert it to a table.|Add a nested object with an address.""",
    "rewrite": """Make it shorter.|Now make it more formal.|Translate it into Spanish.|Translate it into French.
Can you give me another version?|Make it sound friendlier.|Use simpler words.|What did you change, and why?
Now write it as a question.|Add a title.|Say it in {n} words.""",
    "chat": """Can you give me an example?|Tell me more about that.|Summarize that in one sentence.
Why is that so?|Explain it in simpler words.|What is the most important point?|How do I start?|What are the risks?
Can you say that again, but shorter?|What do experts say about it?|Is there a downside?|Give me {n} more ideas.
Turn this into a list.|What would you do in my place?|How long does it take?|How much does it cost?
Write this as an email.|What is the opposite view?|Thank you! And what should I do next?
I am not sure that I understand the first point.""",
}


def _split(text: str) -> list[str]:
    return [one.strip() for one in re.split(r"[|\n]", text) if one.strip()]


def problem(draw: random.Random) -> str:
    """A problem of reasoning-gym."""
    import reasoning_gym

    names = [name for one in PROBLEMS.split() for name, _, n in [one.partition("*")] for _ in range(int(n or 1))]
    question = reasoning_gym.create_dataset(draw.choice(names), size=1, seed=draw.getrandbits(31))[0]["question"]
    if draw.random() < 0.6:
        question = _TERSE.sub("", question).strip() + draw.choice(STEPS)
    return question.strip()


def by_rules(kind: str, draw: random.Random, texts: list[str]) -> str:
    """A request of a kind; `texts` are what rewriting is asked of."""
    if kind == "math" and draw.random() < 0.75:
        return problem(draw)
    names = {name: draw.choice(words) for name, words in WORDS.items()}
    names |= {"first2": draw.choice(WORDS["first"]), "last2": draw.choice(WORDS["last"]), "n": draw.randint(2, 12)}
    names |= {"age": draw.randint(18, 90), "day": draw.randint(1, 28), "price": draw.randint(2, 900)}
    names |= {"number": draw.randint(1000, 99999), "hour": draw.randint(1, 9), "hundreds": 100 * draw.randint(1, 9)}
    names |= {"percent": 5 * draw.randint(1, 19)}
    if kind == "math":
        story = draw.choice(STORIES.splitlines()).format(**names)
        return story[0].upper() + story[1:] + draw.choice(STEPS)
    if kind == "code":
        task = draw.choice(_split(CODE_TASKS))
        name = re.sub(r"\W+", "_", re.sub(r"\b(a|an|the|of|in|with|to)\b", "", task.lower())).strip("_")
        argument, sentence = draw.choice(ARGUMENTS), task[0].upper() + task[1:]
        form, language = draw.choice(CODE_FORMS), draw.choice(LANGUAGES)
        return form.format(task=task, name=name, argument=argument, sentence=sentence, language=language)
    if kind == "json" and draw.random() < 0.4:
        return draw.choice(FACT_FORMS).format(fact=draw.choice(FACTS).format(**names))
    if kind == "json":
        thing, _, fields = draw.choice(_split(THINGS)).partition(":")
        chosen = draw.sample(fields.split(","), draw.randint(3, 5))
        fields = ", ".join(chosen[:-1]) + " and " + chosen[-1]
        return draw.choice(JSON_FORMS).format(thing=thing, fields=fields, n=draw.randint(2, 5))
    if kind == "rewrite":
        long = draw.choice(texts)
        text = draw.choice([one for one in re.split(r"(?<=[.!?])\s+", long) if len(one) > 20] or [long])
        words = [
            one for one in text.lower().split() if one not in ("a", "the", "is", "are", "to") or draw.random() < 0.5
        ]
        options = {"style": draw.choice(_split(STYLES)), "text": text, "long": long, "broken": " ".join(words)}
        return draw.choice(REWRITE_FORMS).format(**options)
    topics = draw.sample(_split(TOPICS), 2)
    return draw.choice(CHAT_FORMS).format(topic=topics[0], topic2=topics[1], who=draw.choice(WHO.split()), **names)


def follow_up(kind: str, draw: random.Random) -> str:
    """What a user may say after an answer."""
    form = draw.choice(_split(FOLLOW_UPS.get(kind if draw.random() < 0.8 else "chat", FOLLOW_UPS["chat"])))
    return form.format(language=draw.choice(LANGUAGES[4:]), n=draw.randint(2, 9))

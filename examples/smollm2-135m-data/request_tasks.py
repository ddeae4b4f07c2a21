"""Instructions by rules: to classify, extract, sort, format, plan, list, compare, decide, write, fill in, complete."""

# `text`, `review` and other subjects are texts by rules; `Words.groups` draws `group`, `items`, `mixed` and so on.
_FORMS = {
    "classify": r"""Is this review positive or negative? {review}
Classify the following review as positive, neutral or negative.\n\n{review}
What is the tone of this message: polite, angry or neutral? "{message}"
Does this text contain a fact or an opinion? {text}
Which of these words does not belong: {odd}?
Which of these are {group}: {mixed}?
Sort these words into {group} and {group2}: {mixed}.
What category do these belong to: {items}?
Label each sentence as a question, a request or a statement.\n\n{message}
How urgent is this message, from 1 to 5? {message}
What kind of text is this: an email, a news report, a story or a notice?\n\n{text}
Which department should answer this: sales, support or accounting? {complaint}
Is the following true or false? {knowledge}
What feeling does the writer of this express? {diary}
Give this text a rating of one to five stars and say why: {review}""",
    "extract": r"""Who is mentioned in this text? {text}
List all names and places in the following text.\n\n{text}
What does the writer of this message want? {message}
Find all numbers in this text and say what each of them means: {news}
When and where does this take place? {notice}
List the verbs in this text: {story}
What are the key words of this text?\n\n{work}
Which words in this sentence are adjectives? {review}
What is the problem, and what should be done about it?\n\n{complaint}
What must I remember from this message? {message}
Read the text and answer the question.\n\nText: {story}\n\nQuestion: Who is it about?
Read the text and answer the question.\n\nText: {news}\n\nQuestion: What happened?
According to this notice, what is not allowed? {notice}
Write down every date and time in this text, or "none".\n\n{message}
Copy the most important sentence of this text: {news}
Which questions does this text leave open? {work}
What does {first} need to do? {message}""",
    "sort": r"""Sort these words alphabetically: {items}.
Put these {group} in order from the smallest to the largest: {items}.
Sort these numbers from low to high: {numbers}.
Arrange these numbers in descending order: {numbers}.
Which is the largest of these numbers: {numbers}?
Sort these words by their length: {mixed}.
Reverse the order of this list: {items}.
Rank these {group} by how common they are: {items}.
Put these steps in order: serve the {dish}, buy {ingredient}, wash {ingredient2}, set the table.
Remove the {group2} from this list: {mixed}.
In which order should I do this: {project}, {project2}, {project3}?""",
    "format": r"""Turn this into a numbered list: {items}, {ingredient}, {ingredient2}.
Write this as a table with two columns: {group} are {items}; {group2} are others.
Write these words in capital letters, each on its own line: {mixed}.
Write the date {month} {day}, {year} in the format YYYY-MM-DD.
Format this as a bulleted list.\n\n{notice}
Put each sentence of this text on its own line: {travel}
Add a heading to this text.\n\n{knowledge}
Make a Markdown table of these {group} with a column for a short description: {items}.
Format this as a letter with a greeting and a closing: {complaint}
Write these names as "last name, first name": {first} {last}, {first2} {last2}, {first3} {last3}.
Make a comma-separated list of the nouns in this text: {travel}
Split this text into a title and a body.\n\n{news}
Put quotation marks where they belong: {first} said I am {feeling} because {reason}
Count the words in this sentence: {knowledge}""",
    "plan": r"""Plan a trip of {n} days to {town} for a {who} who likes {hobby}.
Write an agenda for a meeting of {minutes} minutes about {subject}.
Make a to-do list for {project}.
Write a shopping list for {dish} for {n} people.
I have {price} dollars for a {event}. How should I spend it?
Make a timetable for a {who} who wants to learn {hobby} in {n} weeks.
What are the first three steps of {project}?
Write a packing list for a week in {town} in {month}.
Plan a {event} for {n} guests at {place}.
Make a weekly meal plan with {ingredient}, {ingredient2} and {ingredient3}.
Create a cleaning schedule for {n} people who share a flat.
Write a checklist for opening a {business}.
I have {minutes} minutes before work. How can I practise {hobby}?
Give me an itinerary for a {weekday} in {town} with a {who}.
Plan a lesson of {minutes} minutes on {hobby} for a {who}.
Set three goals for {project}, each with a date in {month}.
Who should do what? {first}, {first2} and {first3} are in charge of {project}.
Write a morning routine for a {job} who is always {feeling}.""",
    "list": r"""List {n} {listed}.
Name three {listed}.
Give me {n} {listed}, each with a short reason.
Suggest {n} names for a {business} in {town}.
Suggest a name for a {colour} {animal} that is always {feeling}.
Write {n} slogans for a {product}.
Give me {n} questions to ask a {job} in an interview.
List the ingredients of {dish}.
What can I cook with {ingredient}, {ingredient2} and {ingredient3}?
Name {n} things that a {job} uses every day.
Give me {n} ideas for a {event} on {weekday}.
Which {n} rules should a {business} have for its customers?
List {n} ways to {verb} {goods}.
What are typical problems with a {product}?
Give me {n} words that describe a {quality} {animal}.
Name {n} things that are {colour}.
List {n} hashtags for a photo of {dish} in {town}.
Give {n} excuses for not going to a {event}.
What should not be missing at a {event} in {month}?""",
    "compare": r"""Compare {thing} and {thing2} in a table.
What are the pros and cons of {thing} for a {who}?
Which is better for a {job}, {thing} or {thing2}?
Name two things that {thing} and {thing2} have in common.
List the advantages and disadvantages of {hobby}.
How is {town} different from {town2}?
Should I choose {dish} or {dish2} for a {event}?
Compare {hobby} with {hobby2} for a {who} who is {feeling}.
A {animal} or a {animal2}: which is the better pet for a {job}?
Compare the costs of {thing} and {thing2}.
I can't decide between {project} and {project2}. Help me.
Is it worth paying {price} dollars for a {product}?
What speaks for {subject}, and what against it?""",
    "write": r"""Write a note to {first} that says that {reason}.
Write a short invitation to a {event} at {place} on {weekday}.
Write a thank-you card to a {job} who helped you to {verb} the {goods}.
Apologize to {first} for missing the {event} because {reason}.
Write a text message to your {who}: you are late because {reason}.
Write an out-of-office message for {month} {day} to {month2} {day2}.
Write a short product description of a {quality} {product} by {company}.
Write a job advertisement for a {job} in {town}.
Write a postcard from {town} to a {who}.
Write a birthday wish for a {job} who loves {hobby}.
Write a short toast for the {event} of {first} and {first2}.
Write a review of a {business} in {town} that was too {quality}.
Write a haiku about a {animal} in {month}.
Write a limerick about a {job} from {town}.
Write a caption for a picture of a {animal} and a {product}.
Write a dialogue of four lines between a {job} and a {who} about {hobby}.
Write a riddle whose answer is "{animal}".
Tell me a joke about a {job} and a {animal}.
Write a headline about a {animal} that was seen in {town}.
Write a sign for {place} that asks people not to {verb} the {goods}.
Write a short notice: {company} is closed on {weekday} because of a {event}.
Write a lost-and-found notice for a {colour} {product} that was lost near {place}.
Write one sentence with the words {animal}, {product} and {feeling}.
Write the first sentence of a story about a {quality} {animal} in {town}.
Write an advertisement for a {event} in {town} for less than {price} dollars.
Write a reminder for {first} to {verb} the {goods} by {weekday}.
Write a tweet about {hobby} by a {feeling} {job}.
Write a diary entry of a {animal} that lives at {place}.
Write a subject line for an email about {subject} to all {job}s.
Write {n} quiz questions about {hobby}.
Write an acrostic poem with the word {animal}.
Write a polite refusal: {first} asked you to help with {project}.
Write a recipe for {dish} in {n} steps.
Write a recipe with {ingredient}, {ingredient2} and {ingredient3} that takes {minutes} minutes.
Write a complaint to {company} about a {product} that cost {price} dollars.
Write a letter of recommendation for {first} {last}, a {job} at {company}.
Write instructions for using a {product}.
Write three rules for {place}.""",
    "reply": r"""Reply to this message: {message}
Answer this email politely and say no.\n\n{message}
Write a short answer to this complaint.\n\n{complaint}
Respond to this review as the owner of the {business}: {review}
A customer writes: "{complaint}" What do you answer?
Reply to {first} and ask for another date: {message}
Answer this in one sentence: {message}
My {who} wrote this to me: "{diary}" What should I say?
Agree to what is asked in this message, but only after {weekday}: {message}
Write what {first2} could answer: {message}""",
    "fill": r"""Fill in this form for {first} {last}, {age} years old, a {job} from {town}.\n\nName:\nAge:\nJob:\nTown:
Complete the form with this information: {first} {last} wants {n} {goods} by {weekday}.\n\nName:\nItem:\nNumber:\nDate:
Fill in the blanks: {first} is a ___ who works in ___ and likes ___.
Fill in the blank: The {animal} was {feeling} because ___.
Complete the sentence: If I had {price} dollars, I would
Continue this story with two sentences.\n\n{story}
Finish this list: {items},
Complete this email.\n\nDear {first},\n\nI am writing to you about {subject}.
Complete the proverb or make up a new one: A {quality} {animal} never
Fill in this template for a {event}.\n\nWhat:\nWhen: {weekday}, {hour} o'clock\nWhere: {place}\nBring:
Complete the table.\n\n| word | opposite |\n|---|---|\n| {quality} | |\n| {feeling} | |
Add one more example: {items}.
What comes next? {weekday}, {weekday2},
Write the missing question. Answer: {knowledge}""",
    "words": r"""Give me a synonym and an antonym of "{quality}".
Use the word "{feeling}" in a sentence about a {job}.
What is the plural of "{animal}", and how is it spelled?
Name three words that rhyme with "{colour}".
Explain the word "{hobby}" to a {who}.
Translate into French: {items}.
Translate into Spanish: The {animal} is {quality}.
Translate into German: I am {feeling} because {reason}.
Define "{event}" in your own words.
What does a {job} do?
Give an example of a {quality} {product}.
Which emoji fits this message? {message}
What is the opposite of a {quality} {product}?
Describe a {animal} without using the word {colour}.
Spell the name "{first} {last}" backwards.
Make a new word from {animal} and {product}, and explain it.""",
}
FORMS = {task: [form.replace(r"\n", "\n") for form in forms.split("\n")] for task, forms in _FORMS.items()}

"""Texts made by rules, of one to four sentences, to rewrite or to work on; and mistakes in a text."""

import random
import re

from request_words import Words


# Sentences of one subject; any of them make a text together.
_SENTENCES = {
    "message": """Hi {first}, I can't come to the {event} on {weekday} because {reason}.
Could you please {verb} the {goods} before {weekday}?|I will call you at {hour} o'clock.
We need {n} more {goods} for the {event}.|Let me know if you have any questions about {subject}.
The meeting about {subject} was moved to {weekday}.|{first2} from {company} still waits for an answer.
Sorry that I did not write earlier, but {reason}.|I have attached the list of the {goods}.
My flight to {town} leaves on {month} {day}.|Can we talk about {subject} tomorrow?|Thanks for your help with {project}.
You can leave the keys at {place}.|I think that {subject} is more urgent than {project}.
Please tell {first2} that I am {feeling} about it.|The {job} said it would take {n} days.""",
    "complaint": """I ordered {n} {goods} on {month} {day}, and only half of them arrived.
The {product} stopped working after {n} days.|Nobody at {company} answered my calls.|I want my money back.
Your {job} was rude to me on the phone.|The parcel was left in the rain in front of {place}.
I paid {price} dollars for a {product} that is broken.|The colour is {colour}, although I asked for {colour2}.
I have been a customer for {n} years and have never been so disappointed.|Order {number} is still not here.
I have sent three emails about {subject} without any reply.|The instructions were only in a foreign language.
If I don't hear from you by {weekday}, I will go to another shop.|It was too {quality} for me.""",
    "story": """The {quality} {animal} lived behind {place}.|One {weekday}, {first} found a {colour} key in the grass.
Nobody in {town} had ever seen such a {quality} {animal}.|{first} was {feeling} and did not say a word.
{first} ran to {place} as fast as possible.|An old {job} opened the door and smiled.
"You are late again," said the {animal}.|The letter was hidden under a {quality} {product}.
It had been raining for {n} days.|{first2} whispered something about {place}.|They walked for {n} hours in the dark.
The {animal} looked at the {animal2} and laughed.|{first} promised to keep the secret.
When the lights went out, everybody was {feeling}.|In the morning, the {goods} were gone.""",
    "news": """The town of {town} will close {place} for {n} weeks.
About {price} people took part in the {event} on {weekday}.
The mayor of {town} said that {subject} was not a problem.|Prices of {goods} rose by {percent} percent in {month}.
{company} is going to hire {price} people in {town}.
The police are looking for a {job} who left a {product} at {place}.
A {animal} escaped from a farm near {town} and was found {n} hours later.|Heavy rain damaged {n} houses.
The new bridge was opened {n} months too late.|{first} {last} won the {hobby} contest for the second time.
{percent} percent of those asked do not like the plan.|The old {product} was sold for {price} dollars.
Trains between {town} and {town2} were delayed by {n} hours.|The council will vote on {weekday}.""",
    "review": """The {dish} was cold and the waiter was {feeling}.|I loved the {product}, and my {who} did too.
We stayed {n} nights in a {quality} hotel in {town}.|The film is too long, but the music is wonderful.
The staff were friendly and helped us with everything.|I would not buy this {product} again.
It is a {quality} place, perfect for a {who}.|The room was {quality} and smelled of paint.
For {price} dollars, you can't expect more.|The book has {price} pages, and I read it in {n} days.
The battery lasts only {hour} hours.|I have already recommended {company} to {n} friends.
The {event} was {quality}, but the seats were uncomfortable.|Best {dish} in {town}!""",
    "diary": """I got up at {hour} and went to {place}.|Today I was {feeling} all day.
I tried {hobby} for the first time.
{first} gave me a {colour} {product} for my birthday.|We ate {dish} and talked about {project}.
I have to {verb} the {goods} tomorrow.|My {animal} is ill, and the vet is in {town}.
I did not sleep well because {reason}.|In the evening I called {first2}.|I am going to save {price} dollars by {month}.
After lunch, I met an old friend who is now a {job}.|I think that {hobby} is harder than {hobby2}.
On the way home, I lost my {product}.|I wish that I had more time for {hobby}.""",
    "notice": """The lift is out of order until {weekday}.|Dogs are not allowed in {place}.
Please do not {verb} the {goods}.
The {event} starts at {hour} o'clock and ends after {n} hours.|Tickets cost {price} dollars and are sold at {place}.
Everyone who works with the {product} must wear gloves.|The water will be turned off for {n} hours on {month} {day}.
Call {number} if you see smoke.|Children under {n} must be with an adult.|Lost: a {colour} {product}, near {place}.
Staff must tell {first} {last} about any change in {subject}.|Bicycles that block the door will be removed.
The {business} is closed on {weekday} and {weekday2}.|The course in {hobby} is full.""",
    "knowledge": """Bees visit hundreds of flowers in a single day.|The moon has no air, so there is no sound on it.
Most of the water on Earth is salty.|Glass is made of sand that is heated until it melts.|Iron rusts when it gets wet.
A healthy adult needs between seven and nine hours of sleep.|Owls can turn their heads very far.
Coffee came from Ethiopia.
Trees take in carbon dioxide and give off oxygen.|The heart pumps blood through the whole body.|Snakes have no eyelids.
Paper was invented in China about two thousand years ago.|Light travels faster than sound.
Bread rises because of yeast.
Volcanoes bring melted rock from deep inside the Earth to the surface.|Camels store fat in their humps, not water.
People have used sundials for thousands of years to tell the time.
Penguins live only in the southern half of the world.
The first trains were slower than a horse.|Salt was once as valuable as silver.|Plants grow towards the light.""",
    "work": """{company} sells {goods} in {n} countries.|Our team must finish {project} by {month} {day}.
The report shows that costs have grown by {percent} percent.|{first} {last} leads the department since {year}.
Due to the fact that {reason}, the delivery will be late.|We are looking for a {job} with {n} years of experience.
It is very important that all {goods} are checked twice.|The customer asked for a discount of {percent} percent.
Our competitors offer the {product} for {price} dollars.|The software was tested by {n} people over {n2} weeks.
In my opinion, we should not spend any more money on {subject}.|The contract with {company2} ends in {month}.
Last year, we sold {number} {goods}.|New employees get a {product} and a tour of the office.""",
    "travel": """We took the train from {town} to {town2}.|The hotel in {town} was {quality} and near {place}.
On the second day, we visited {place} and ate {dish}.|It takes {n} hours to walk up the hill.
The best time to visit is {month}, when it is {quality}.|A local {job} showed us {place}.|Our suitcase got lost.
We saw a {animal} next to the road.|The ferry costs {price} dollars and leaves at {hour} o'clock.
{first} forgot the passports in {town}.|The beach was {quality} and full of {goods}.
We would like to go back in {month}.
The streets smell of {dish}.|You should bring a {product} and good shoes.""",
}
SUBJECTS = {subject: re.split(r"[|\n]", sentences) for subject, sentences in _SENTENCES.items()}
_MISTAKES: dict[str, list[str]] = {}
for _pair in """is/are are/is was/were were/was has/have have/has a/ the/ an/a to/for not/no their/there went/goed
bought/buyed took/taked ate/eated gave/gived does/do that/what because/becouse friend/freind received/recieved
before/befor tomorrow/tommorow until/untill will/would in/on on/at too/to it/its are/be and/an who/which""".split():
    _right, _, _wrong = _pair.partition("/")
    _MISTAKES.setdefault(_right, []).append(_wrong)


def text_by_rules(words: Words, subject: str | None = None) -> str:
    """Sentences of one subject, else of any."""
    sentences = SUBJECTS[subject or words.draw.choice(sorted(SUBJECTS))]
    text = words.fill(" ".join(words.draw.sample(sentences, words.draw.choice((1, 2, 2, 3, 3, 4)))))
    return re.sub(r"(^|[.!?]\s+)(\w)", lambda match: match[0].upper(), text)


def with_mistakes(text: str, draw: random.Random) -> str:
    """Wrong words, missing words, and half of the time neither capitals nor full stops."""
    words = [draw.choice(_MISTAKES.get(word, [word])) if draw.random() < 0.6 else word for word in text.split(" ")]
    text = " ".join(word for word in words if word)
    return re.sub(r"[.,!?'\"]", "", text.lower()) if draw.random() < 0.5 else text
